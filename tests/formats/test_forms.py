"""Weights are the same in every form they have on disk, and a run may start from any of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lacuna.config import Config, to_toml
from lacuna.config.adapters import LoraConfig
from lacuna.formats.adapter import export_adapter
from lacuna.formats.checkpoint import RUN, model_tensors
from lacuna.formats.convert import convert
from lacuna.formats.huggingface import save_model_description
from lacuna.formats.opening import load_any_model
from lacuna.formats.reader import read_tensors
from lacuna.formats.writer import write_checkpoint
from lacuna.model.layers.lora import add_adapters, initialize_adapters
from lacuna.parallel.processes import Process
from runs import checkpoint, curve, lacuna, steps, together, train
from tiny import differing, random_model, tiny_config, tokenizer_of_words

pytestmark = pytest.mark.slow  # whole runs of the command line


@pytest.fixture(scope="module")
def started(
    world: Path, straight: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Three steps each from the same weights in three forms; a checkpoint made a model folder."""
    folder, source, last = (
        tmp_path_factory.mktemp("forms"),
        straight / "hf",
        checkpoint(straight, 8),
    )
    short = ("--training.steps", 3)

    def train_from_step_0() -> None:
        lacuna("convert", source, checkpoint(folder / "step-0", 0), "--to", "dcp")
        train(world, folder / "step-0", *short)

    together(
        train_from_step_0,
        lambda: lacuna("convert", last, folder / "converted", "--to", "hf"),
        lambda: train(
            world, folder / "hf", *short, "--model.config", "none", "--model.name_or_path", source
        ),
        lambda: train(
            world, folder / "initial_load_path", *short, "--checkpoint.initial_load_path", last
        ),
    )
    return {path.name: path for path in folder.iterdir()}


def test_a_run_from_a_converted_step_0_is_the_run_from_the_hugging_face_folder(
    straight: Path, started: dict[str, Path]
) -> None:
    assert curve(started["step-0"]) == curve(started["hf"])
    assert curve(started["hf"])[0][1] < curve(straight)[0][1] - 0.5, "these weights are trained"


def test_initial_load_path_takes_the_weights_alone_and_counts_steps_from_0(
    started: dict[str, Path],
) -> None:
    keys = ("loss", "grad_norm", "lr", "tokens")
    assert curve(started["initial_load_path"], *keys) == curve(started["hf"], *keys)
    assert [step for step, *_ in curve(started["hf"])] == [1, 2, 3]
    assert steps(started["initial_load_path"]) == [3]


def test_a_converted_checkpoint_is_the_runs_own_model_for_transformers(
    straight: Path, started: dict[str, Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(started["converted"], dtype="auto")
    expected, found = load_file(straight / "hf" / "model.safetensors"), model.state_dict()
    assert set(expected) <= set(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(started["converted"]).decode(256) == "<end>"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_weights_alone_holds_the_exported_ones(weights_only: Path) -> None:
    exported = load_file(weights_only / "hf" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in exported.values())
    tensors = {f"model.{name}": torch.empty(tensor.shape) for name, tensor in exported.items()}
    read_tensors(str(checkpoint(weights_only, 4)), tensors, Process())
    assert all(
        torch.equal(tensors[f"model.{name}"], tensor.float()) for name, tensor in exported.items()
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("architecture", ["llama_tied", "gemma2", "bloom", "qwen3_moe"])
def test_a_checkpoint_of_any_architecture_opens_as_the_model_it_was_made_of(
    architecture: str, tmp_path: Path
) -> None:
    random_model(tiny_config(architecture), "eager").save_pretrained(tmp_path / "hf")
    tokenizer_of_words().save_pretrained(tmp_path / "hf")
    convert(str(tmp_path / "hf"), str(tmp_path / "step-0"), "dcp", None)
    expected, found = (load_any_model(str(tmp_path / form), "cpu")[0] for form in ("hf", "step-0"))
    assert differing(dict(expected.named_buffers()), dict(found.named_buffers())) == []
    assert differing(expected.state_dict(), found.state_dict()) == []
    ids = torch.arange(4, 20)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)


def beside_bfloat16(folder: Path, settings: LoraConfig) -> tuple[str, str]:
    """Folders of a bfloat16 model, whose configuration says it is unquantised, and its adapter."""
    base, adapter = str(folder / "base"), str(folder / "adapter")
    random_model(tiny_config("llama")).to(torch.bfloat16).save_pretrained(base)
    described = json.loads(Path(base, "config.json").read_text()) | {"quantization_config": None}
    Path(base, "config.json").write_text(json.dumps(described))
    tokenizer_of_words().save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    add_adapters(model, settings, torch.float32)
    initialize_adapters(model, seed=0)
    export_adapter(model, tokenizer_of_words(), settings, base, adapter)
    return base, adapter


def test_modules_trained_whole_in_float32_are_merged_into_a_bfloat16_model_that_computes(
    tmp_path: Path,
) -> None:
    base, adapter = beside_bfloat16(
        tmp_path, LoraConfig(rank=2, modules=("embed_tokens", "norm", "lm_head"))
    )
    expected = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    ids = torch.arange(4, 20)[None]
    for source in (adapter, base):
        assert torch.equal(load_any_model(source, "cpu")[0](ids).logits, expected(ids).logits)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_adapter_is_merged_into_a_bfloat16_model_of_few_positions(tmp_path: Path) -> None:
    _, adapter = beside_bfloat16(tmp_path, LoraConfig(rank=2))
    assert "the largest difference of any of 16 is 0" in convert(
        adapter, str(tmp_path / "hf"), "hf", None, None, False
    )
    assert (
        differing(
            load_file(tmp_path / "hf/model.safetensors"),
            load_file(tmp_path / "base/model.safetensors"),
        )
        == []
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_adapters_opens_in_the_types_of_the_model_they_are_beside(
    tmp_path: Path,
) -> None:
    base, settings = str(tmp_path / "base"), LoraConfig(rank=2, modules=("lm_head",))
    random_model(tiny_config("llama")).to(torch.bfloat16).save_pretrained(base)
    expected = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    add_adapters(model, settings, torch.float32)
    initialize_adapters(model, seed=0)

    def describe(folder: str) -> None:
        save_model_description(model.config, tokenizer_of_words(), None, folder)
        Path(folder, RUN).write_text(
            to_toml(Config(model={"name_or_path": base}, training={"seq_len": 32}, lora=settings))
        )

    write_checkpoint(
        str(tmp_path / "step-1"), model_tensors(model), {"step": 1}, describe, Process()
    )
    found, *_ = load_any_model(str(tmp_path / "step-1"), "cpu")
    assert differing(dict(expected.named_buffers()), dict(found.named_buffers())) == []
    assert differing(expected.state_dict(), found.state_dict()) == []
