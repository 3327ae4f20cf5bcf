"""What a run with adapters beside quantised experts saves, resumes, exports and merges."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lacuna.model.architecture import meta_model
from lacuna.model.layers.bits import dequantize, packed_sizes, quantize
from lacuna.model.layers.quantized import quantize_layers, quantized_modules
from lacuna.model.layers.quantized_stacks import quantized_stacks
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
from tiny import random_model, tiny_config

ADAPTERS = ("--lora.rank", 4, "--lora.targets", "*.self_attn.*", "--lora.parameters", "*.experts.*")
TWO = ("--cpus", 2, "--training.batch_size", 2)


def settings(world: Path, base: str = "base", form: str = "nf4") -> tuple[object, ...]:
    start = ("--model.name_or_path", world / base, "--model.config", "none")
    tokenizer = ("--model.tokenizer_path", world / "model")
    return *start, *tokenizer, *ADAPTERS, "--quantization.base", form


@torch.no_grad()
def write_dequantised(model: PreTrainedModel, form: str, folder: Path) -> None:
    """Writes a model with the weights that its quantised ones stand for."""
    named = meta_model(model.config, "eager", torch.float32)
    quantize_layers(named.requires_grad_(False), form, [])
    for name in quantized_modules(named):
        weight = model.get_parameter(f"{name}.weight")
        weight.copy_(dequantize(quantize(weight, form), form, weight.shape, torch.float32))
    for path, module in quantized_stacks(named).items():
        for name, shape in module.dense_shapes:
            for one in model.get_parameter(f"{path}.{name}"):
                one.copy_(dequantize(quantize(one, form), form, shape, torch.float32))
    model.save_pretrained(folder)


def write_quantised(world: Path, name: str, has_experts: bool) -> None:
    """Writes the base as files of bitsandbytes in int8, with its experts so as well or not."""
    folder = world / name
    shutil.copytree(world / "base", folder)
    tensors = load_file(folder / "model.safetensors")
    for key in [*tensors]:
        if key.endswith("_proj.weight") and (has_experts or ".experts." not in key):
            shape = tensors[key].shape
            scales, codes, _ = quantize(tensors[key], "int8").split(packed_sizes("int8", shape))
            tensors[key] = codes.clone().view(torch.int8).view(shape)
            tensors[key.replace("weight", "SCB")] = scales.clone().view(torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    described["quantization_config"] = quantised
    (folder / "config.json").write_text(json.dumps(described))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_world(tmp_path_factory.mktemp("experts"))
    model = random_model(tiny_config("qwen3_moe", vocab_size=257))
    model.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "base")
    for form in ("nf4", "int8"):
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        write_dequantised(base, form, folder / f"dequantised-{form}")
    write_quantised(folder, "linear as int8", has_experts=False)
    write_quantised(folder, "all as int8", has_experts=True)
    return folder


@pytest.fixture(scope="module")
def runs(world: Path) -> dict[str, Path]:
    spread = (*TWO, "--parallelism.expert_parallel_degree", 2)
    kinds = {
        "one": settings(world),
        "two": (*settings(world), *TWO),
        "spread": (*settings(world), *spread),
        "int8": settings(world, form="int8"),
        "int8 as stored": settings(world, "linear as int8", "int8"),
    }
    folders = {kind: world / "runs" / kind for kind in kinds}
    together(*(lambda kind=kind: train(world, folders[kind], *kinds[kind]) for kind in kinds))
    return folders


def logits(model: torch.nn.Module) -> Tensor:
    return model.eval()(input_ids=torch.arange(5, 65).reshape(2, 30)).logits.detach()


@pytest.mark.slow
def test_ranks_and_files_make_no_difference(runs: dict[str, Path]) -> None:
    for one, two in (("one", "two"), ("one", "spread"), ("int8", "int8 as stored")):
        for (_, *first), (_, *second) in zip(curve(runs[one]), curve(runs[two]), strict=True):
            assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    world: Path, runs: dict[str, Path]
) -> None:
    stop_after(2, world, world / "again", *settings(world))
    train(world, world / "again", *settings(world))
    assert curve(world / "again") == curve(runs["one"])
    assert weights(world / "again") == weights(runs["one"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "spread", "int8", "int8 as stored"])
def test_adapters_are_merged_into_what_they_were_trained_beside(
    world: Path, runs: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    form = "int8" if "int8" in kind else "nf4"
    base = AutoModelForCausalLM.from_pretrained(world / f"dequantised-{form}")
    before = logits(base)
    trained = logits(PeftModel.from_pretrained(base, runs[kind] / "hf" / "adapter"))
    assert (trained - before).abs().max() > 1e-2
    said = lacuna("convert", checkpoint(runs[kind], 8), tmp_path / "merged", "--to", "hf")
    assert f"dequantised from {form}" in said
    for folder in (runs[kind] / "hf", tmp_path / "merged"):
        merged = logits(AutoModelForCausalLM.from_pretrained(folder))
        torch.testing.assert_close(merged, trained, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_adapters_are_merged_into_the_base_that_is_asked_for(
    world: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(world / "base")
    expected = logits(PeftModel.from_pretrained(base, runs["one"] / "hf" / "adapter"))
    for source in (checkpoint(runs["one"], 8), runs["one"] / "hf" / "adapter"):
        folder = tmp_path / source.name
        lacuna("convert", source, folder, "--to", "hf", "--base", world / "base")
        merged = logits(AutoModelForCausalLM.from_pretrained(folder))
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)


def test_experts_that_files_have_quantised_are_refused(world: Path) -> None:
    said = refused("train", world / "run.toml", *settings(world, "all as int8", "int8"))
    assert "is quantised, and experts that files have quantised do not make stacks" in said


def test_loftq_beside_adapters_of_stacks_is_refused(world: Path) -> None:
    words = (*settings(world), "--lora.init", "loftq", "--dry-run")
    said = refused("train", world / "run.toml", *words)
    assert "lora.init, lora.parameters: what quantising took from stacks is not given" in said
