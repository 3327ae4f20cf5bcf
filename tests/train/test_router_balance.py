"""Runs that balance experts: stopped and resumed, exported, reported, and refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from runs import curve, refused, rows, stop_after, together, train, weights, write_model
from tiny import tiny_config

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def experts(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a tiny DeepSeek-V3 and a tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("experts"))
    tokens = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    tiny_config("deepseek_v3", **tokens).save_pretrained(folder)
    return folder


def flags(experts: Path) -> tuple[object, ...]:
    return (
        *("--model.config", experts, "--model.router_bias_update_rate", 0.01, "--metrics.router"),
        *("--cpus", 2, "--parallelism.expert_parallel_degree", 2, "--validation.freq", 3),
        *("--activation_checkpoint.mode", "full", "--training.gradient_accumulation_steps", 2),
        *("--checkpoint.export_dtype", "bfloat16"),
    )


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit_and_exports_its_biases(
    world: Path, experts: Path, tmp_path: Path
) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    held_out = ("--validation.dataset", world / "validation.jsonl")
    own = (*flags(experts), *held_out)
    together(lambda: train(world, straight, *own), lambda: stop_after(3, world, stopped, *own))
    said = train(world, stopped, *own)
    assert "violation" in said
    told = ("router_load_1", "router_violation", "router_entropy", "router_violation_1")
    assert curve(stopped, *told) == curve(straight, *told)
    assert weights(stopped) == weights(straight)
    for row in rows(straight):
        if "loss" in row:
            share = row["router_load_1"]
            assert sum(share) == pytest.approx(1)
            assert row["router_violation"] == pytest.approx(max(share) * 4 - 1)
            assert "router_load_0" not in row  # a dense layer
    with safe_open(straight / "hf" / "model.safetensors", "pt") as file:
        bias = file.get_tensor(BIAS)
    assert bias.dtype == torch.float32
    # Eight moves of 0.01, up, down or none.
    assert torch.allclose(bias / 0.01, (bias / 0.01).round(), atol=1e-3)
    assert 0.005 < bias.abs().max() < 0.085
    opened = AutoModelForCausalLM.from_pretrained(straight / "hf")
    assert torch.equal(opened.get_buffer(BIAS), bias)
    assert json.loads((straight / "hf" / "config.json").read_text())["model_type"] == "deepseek_v3"


@pytest.mark.parametrize(
    ("wrong", "second"),
    [
        (("--parallelism.tensor_parallel_degree", 2), "parallelism.tensor_parallel_degree"),
        (("--compile.enable",), "compile.enable"),
        (("--activation_checkpoint.mlp_chunks", 2), "activation_checkpoint.mlp_chunks"),
    ],
)
@pytest.mark.parametrize(
    ("asked", "first"),
    [
        (("--model.router_bias_update_rate", 0.01), "model.router_bias_update_rate"),
        (("--metrics.router",), "metrics.router"),
    ],
)
def test_layouts_that_cannot_count_are_refused(
    wrong: tuple[object, ...], second: str, asked: tuple[object, ...], first: str, world: Path
) -> None:
    said = refused("train", world / "run.toml", *asked, *wrong)
    assert first in said
    assert second in said


@pytest.mark.parametrize(
    ("first", "second", "more"),
    [
        ("model.router_bias_update_rate", "lora.rank", ()),
        ("metrics.router", "lora.parameters", ("experts.*",)),
        ("metrics.router", "quantization.base", ("nf4",)),
    ],
)
def test_adapters_move_no_bias_and_changed_stacks_are_not_counted(
    first: str, second: str, more: tuple[str, ...], world: Path
) -> None:
    asked = (f"--{first}", *((0.01,) if first.startswith("model") else ()))
    wrong = (f"--{second}", *more) if more else ()
    said = refused("train", world / "run.toml", "--lora.rank", 4, *asked, *wrong)
    assert first in said
    assert second in said


def test_adapters_beside_experts_report_the_routers(
    world: Path, experts: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    short = ("--training.steps", 1, "--checkpoint.interval", 1)
    train(world, base, "--model.config", experts, *short)
    adapters = ("--model.config", "none", "--model.name_or_path", base / "hf", "--lora.rank", 2)
    shown = ("--metrics.router", "--metrics.enable_tensorboard")
    train(world, tmp_path / "run", *adapters, *shown, *short)
    assert rows(tmp_path / "run")[0]["router_entropy"] > 0


def test_a_dense_model_is_refused_before_it_is_made(world: Path, tmp_path: Path) -> None:
    words = ("--metrics.router", "--job.dump_folder", tmp_path, "--dry-run")
    said = refused("train", world / "run.toml", *words)
    assert "metrics.router: 'llama' models have no stacks of experts" in said
