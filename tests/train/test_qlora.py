"""What a run with adapters beside quantised weights saves, resumes, exports and merges."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lacuna.model.layers.bits import dequantize, packed_sizes, quantize
from runs import (
    checkpoint,
    curve,
    lacuna,
    make_world,
    refused,
    stop_after,
    together,
    train,
    weights,
)
from tiny import differing, random_model

pytestmark = pytest.mark.slow  # whole runs of the command line

FORMS = ("nf4", "int8")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a run, and a base: as it is, dequantised, and quantised as in bitsandbytes' files."""
    folder = make_world(tmp_path_factory.mktemp("qlora"))
    model = random_model(AutoConfig.from_pretrained(folder / "model"))
    model.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "base")
    whole = load_file(folder / "base" / "model.safetensors")
    linear = [name for name in whole if name.endswith("_proj.weight")]
    for form in FORMS:
        packed = {name: quantize(whole[name], form) for name in linear}
        dense = {
            name: dequantize(packed[name], form, whole[name].shape, torch.float32)
            for name in linear
        }
        write(folder / f"dequantized-{form}", model.config.to_dict(), whole | dense)
        settings = {"load_in_8bit": True}
        if form == "nf4":
            settings = {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
            }
        about = {"quantization_config": {"quant_method": "bitsandbytes", **settings}}
        stored = {
            key: part
            for name in linear
            for key, part in as_stored(name, packed[name], whole[name].shape, form)
        }
        rest = {name: tensor for name, tensor in whole.items() if name not in linear}
        write(folder / f"quantized-{form}", model.config.to_dict() | about, rest | stored)
    return folder


def write(folder: Path, described: dict[str, object], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def as_stored(name: str, packed: Tensor, shape: torch.Size, form: str) -> list[tuple[str, Tensor]]:
    """A packed weight as bitsandbytes writes it."""
    scales, *coded, codes, _ = packed.split(packed_sizes(form, shape))
    if form == "int8":
        rows = scales.clone().view(torch.float32)
        return [
            (name, codes.clone().view(torch.int8).view(shape)),
            (name.replace("weight", "SCB"), rows),
        ]
    *groups, offset = scales.clone().view(torch.float32).tolist()
    about = {
        "quant_type": "nf4",
        "blocksize": 64,
        "shape": [*shape],
        "dtype": "float32",
        "nested_blocksize": 256,
    }
    state = json.dumps(about | {"nested_dtype": "float32", "nested_offset": offset}).encode()
    return [
        (name, codes.clone()[:, None]),
        (f"{name}.absmax", coded[0].clone()),
        (f"{name}.nested_absmax", torch.tensor(groups)),
        (f"{name}.quant_map", torch.zeros(16)),
        (f"{name}.nested_quant_map", torch.zeros(256)),
        (f"{name}.quant_state.bitsandbytes__nf4", torch.tensor([*state], dtype=torch.uint8)),
    ]


def settings(world: Path, base: str = "base", form: str = "nf4") -> tuple[object, ...]:
    start = (
        "--model.name_or_path",
        world / base,
        "--model.config",
        "none",
        "--model.tokenizer_path",
    )
    return *start, world / "model", "--lora.rank", 4, "--lora.alpha", 8, "--quantization.base", form


@pytest.fixture(scope="module")
def runs(world: Path) -> dict[str, Path]:
    """One run each, of two processes, and from weights that are quantised already, of each form."""
    two = ("--cpus", "2", "--training.batch_size", "2")
    kinds = {form: settings(world, form=form) for form in FORMS}
    kinds |= {f"{form} on two": (*settings(world, form=form), *two) for form in FORMS}
    kinds |= {f"{form} as stored": settings(world, f"quantized-{form}", form) for form in FORMS}
    folders = {kind: world / "runs" / kind for kind in kinds}
    together(*(lambda kind=kind: train(world, folders[kind], *kinds[kind]) for kind in kinds))
    return folders


def logits(model: torch.nn.Module) -> Tensor:
    return model.eval()(input_ids=torch.arange(5, 65).reshape(2, 30)).logits.detach()


def with_adapter(base: Path, adapter: Path) -> Tensor:
    """The logits of peft's model of a base and an adapter."""
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_and_weights_quantised_already_train_the_same_adapter(
    runs: dict[str, Path], form: str
) -> None:
    assert curve(runs[form]) == curve(runs[f"{form} as stored"])
    for (_, *one), (_, *two) in zip(curve(runs[form]), curve(runs[f"{form} on two"]), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    world: Path, runs: dict[str, Path]
) -> None:
    stop_after(2, world, world / "again", *settings(world))
    train(world, world / "again", *settings(world))
    assert curve(world / "again") == curve(runs["nf4"])
    assert weights(world / "again") == weights(runs["nf4"])


@pytest.mark.parametrize("kind", [*FORMS, "nf4 on two", "nf4 as stored"])
def test_the_adapter_is_merged_into_what_it_was_trained_beside(
    world: Path, runs: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    trained = with_adapter(world / f"dequantized-{kind[:4].strip()}", runs[kind] / "hf" / "adapter")
    said = lacuna("convert", checkpoint(runs[kind], 8), tmp_path / "merged", "--to", "hf")
    assert "dequantised from" in said and "Highest logits of four probe tokens before" in said
    for folder in (runs[kind] / "hf", tmp_path / "merged"):
        merged = AutoModelForCausalLM.from_pretrained(folder)
        assert merged.dtype == torch.float32 and not hasattr(merged.config, "quantization_config")
        torch.testing.assert_close(logits(merged), trained, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_merged_into_the_base_that_is_asked_for(
    world: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    original = with_adapter(world / "base", runs["nf4"] / "hf" / "adapter")
    shutil.copytree(runs["nf4"] / "hf" / "adapter", tmp_path / "of no base")
    described = tmp_path / "of no base" / "adapter_config.json"
    described.write_text(
        json.dumps(json.loads(described.read_text()) | {"base_model_name_or_path": None})
    )
    sources = {"run": checkpoint(runs["nf4"], 8), "adapter": runs["nf4"] / "hf" / "adapter"}
    sources |= {"moved": tmp_path / "of no base"}
    for name, source in sources.items():
        said = lacuna("convert", source, tmp_path / name, "--to", "hf", "--base", world / "base")
        assert f"Merged into the weights of {world / 'base'}, as its files have them" in said
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        torch.testing.assert_close(logits(merged), original, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", ["", "checkpoint/step-8"])
def test_an_adapter_is_had_alone(runs: dict[str, Path], place: str, tmp_path: Path) -> None:
    lacuna("convert", runs["nf4"] / place, tmp_path / "alone", "--to", "hf", "--adapter-only")
    name = "adapter_model.safetensors"
    assert (tmp_path / "alone" / name).read_bytes() == (
        runs["nf4"] / "hf" / "adapter" / name
    ).read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--lora.rank", "0"),
            "quantization.base, lora.rank: quantised weights only learn through adapters",
        ),
        (
            ("--lora.dora", "true"),
            "quantization.base, lora.dora: DoRA measures weights, which are packed",
        ),
        (("--parallelism.tensor_parallel_degree", "2"), "packed weights do not split"),
        (("--quantization.base", "int4"), "quantization.base: should be 'none', 'int8' or 'nf4'"),
        (
            ("--model.name_or_path", "quantized-int8"),
            "quantised by bitsandbytes as int8, quantization.base is nf4",
        ),
        (
            ("--model.name_or_path", "awq"),
            "its weights are quantised by awq: only bitsandbytes' int8, and nf4 with",
        ),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    world: Path, flags: tuple[str, ...], said: str
) -> None:
    (world / "awq").mkdir(exist_ok=True)
    described = AutoConfig.from_pretrained(world / "base").to_dict() | {
        "quantization_config": {"quant_method": "awq"}
    }
    (world / "awq" / "config.json").write_text(json.dumps(described))
    given = dict(zip(*[iter(settings(world))] * 2, strict=True))
    given |= {flags[0]: world / flags[1] if flags[0] == "--model.name_or_path" else flags[1]}
    words = [word for pair in given.items() for word in pair]
    assert said in refused("train", world / "run.toml", *words, "--dry-run")


@pytest.mark.parametrize(
    ("start", "more", "said"),
    [
        (("base", "none"), None, "lora.init, quantization.base: needs what quantising took"),
        (("base", "nf4"), "nf4/hf/adapter", "lora.init, lora.adapter: only for new adapters"),
        (
            ("quantized-nf4", "nf4"),
            None,
            "lora.init = loftq: the model's files are quantised, and no longer have",
        ),
    ],
)
def test_adapters_begin_as_what_was_lost_where_something_was_and_is_known(
    world: Path, runs: dict[str, Path], start: tuple[str, str], more: str | None, said: str
) -> None:
    adapter = () if more is None else ("--lora.adapter", world / "runs" / more)
    words = (*settings(world, *start), *adapter, "--lora.init", "loftq", "--dry-run")
    assert said in refused("train", world / "run.toml", *words)


def test_what_files_have_quantised_does_not_learn_and_is_not_taken_for_weights(
    world: Path, tmp_path: Path
) -> None:
    said = refused(
        "train",
        world / "run.toml",
        *settings(world, "quantized-int8", "int8"),
        "--lora.modules",
        "down_proj",
        "--dry-run",
    )
    assert (
        "lora.modules: ['model.layers.0.mlp.down_proj'] is quantised in the model's files" in said
    )
    AutoTokenizer.from_pretrained(world / "base").save_pretrained(world / "quantized-int8")
    for form in ("hf", "gguf"):
        said = refused("convert", world / "quantized-int8", tmp_path / "no", "--to", form)
        assert (
            "quantized-int8: its weights are quantised: give the model that they were made from"
            in said
        )
    assert not (tmp_path / "no").exists()


def test_a_run_is_merged_into_another_base_by_its_adapter(
    world: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    for source in (runs["nf4"], runs["nf4"] / "hf" / "adapter"):
        said = lacuna(
            "convert", source, tmp_path / source.name, "--to", "hf", "--base", world / "base"
        )
        assert f"Merged into the weights of {world / 'base'}, as its files have them" in said
    one, two = (
        load_file(tmp_path / name / "model.safetensors") for name in (runs["nf4"].name, "adapter")
    )
    assert not differing(one, two)


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_quantised_files_is_merged_into_them(
    world: Path, runs: dict[str, Path], form: str, tmp_path: Path
) -> None:
    AutoTokenizer.from_pretrained(world / "base").save_pretrained(world / f"quantized-{form}")
    said = lacuna(
        "convert", runs[f"{form} as stored"] / "hf" / "adapter", tmp_path / "new", "--to", "hf"
    )
    assert f"dequantised from {form}" in said
    one, two = (
        load_file(at / "model.safetensors")
        for at in (tmp_path / "new", runs[f"{form} as stored"] / "hf")
    )
    torch.testing.assert_close(one, two)


def test_what_cannot_be_merged_is_refused(
    world: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    last, no = checkpoint(runs["nf4"], 8), tmp_path / "no"
    other = random_model(AutoConfig.from_pretrained(world / "model", hidden_size=32))
    other.save_pretrained(tmp_path / "other")
    said = refused("convert", last, no, "--to", "hf", "--base", tmp_path / "other")
    assert "it belongs to another model configuration" in said
    random_model(AutoConfig.from_pretrained(world / "model"), seed=1).save_pretrained(
        tmp_path / "twin"
    )
    for source in (last, runs["nf4"] / "hf" / "adapter"):
        said = refused("convert", source, no, "--to", "hf", "--base", tmp_path / "twin")
        assert f"twin is another model than the adapters', {world / 'base'}" in said
    said = refused("convert", world / "base", no, "--to", "hf", "--base", world / "base")
    assert "has no adapters to merge" in said
    said = refused(
        "convert", runs["nf4"], no, "--to", "hf", "--adapter-only", "--dtype", "bfloat16"
    )
    assert "--dtype is for whole models" in said
    said = refused("convert", world / "base", no, "--to", "hf", "--adapter-only")
    assert "has no adapters" in said
    assert not no.exists()
