"""Adapters of experts that are spread over ranks learn, load and are written as in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from test_stacks import adapted_by_peft, logits
from transformers import AutoModelForCausalLM

from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.formats.adapter import export_adapter
from lacuna.model.build import build_model
from lacuna.model.layers.lora import without_adapters
from lacuna.parallel.fsdp import inference
from lacuna.parallel.mesh import Layout
from lacuna.train.step import sums_of, total_counts
from layouts import LOSS, Case, check_same, configuration, outcomes, own_batches
from runs import curve, make_world, train
from tiny import CPU, differing, mesh_of, random_model, run_ranks, tiny_config, tokenizer_of_words

TWO = Layout(dp_shard=2, ep=2)
FULL = ActivationCheckpointConfig(mode="full")


def saved(kind: str, folder: Path) -> LoraConfig:
    """A tiny model in `folder`, and the settings of an adapter of peft's there that changes it."""
    adapted_by_peft(kind, folder / "theirs")
    random_model(tiny_config(kind), "eager").save_pretrained(folder / "base")
    return LoraConfig(adapter=str(folder / "theirs"))


@pytest.mark.parametrize("kind", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss"])
def test_adapters_of_spread_experts_learn_those_of_one_process(kind: str, tmp_path: Path) -> None:
    case = Case(lora=saved(kind, tmp_path))
    [alone] = outcomes(tmp_path / "base", [case])
    assert all(gradient.any() for gradient in alone.gradients.values())
    layouts = [Case(TWO, 2), Case(TWO, 2, recompute=FULL), Case(TWO, 2, zero_stage=1)]
    if kind == "qwen3_moe":  # transformers has no plan for gpt_oss
        layouts.append(Case(Layout(tp=2, ep=2)))
    for one in outcomes(tmp_path / "base", [replace(each, lora=case.lora) for each in layouts]):
        check_same(one, alone)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        ("qwen3_moe", "nf4"),
        pytest.param("qwen3_moe", "int8", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "nf4", marks=pytest.mark.slow),
    ],
)
def test_adapters_learn_beside_a_quantised_base_as_in_one_process(
    kind: str, base: Literal["nf4", "int8"], tmp_path: Path
) -> None:
    random_model(tiny_config(kind), "eager").save_pretrained(tmp_path)
    case = Case(base=base, lora=LoraConfig(rank=3, parameters=("*.experts.*",)))
    [alone] = outcomes(tmp_path, [case])
    spread = replace(case, layout=TWO, accumulation=2)
    for one in outcomes(tmp_path, [spread, replace(spread, recompute=FULL)]):
        check_same(one, alone)


@pytest.mark.slow
def test_adapters_of_experts_on_four_ranks_learn_those_of_one_process(tmp_path: Path) -> None:
    case = Case(lora=saved("qwen3_moe", tmp_path))
    [alone] = outcomes(tmp_path / "base", [case])
    layouts = [
        Layout(dp_shard=4, ep=2),
        Layout(dp_shard=4, ep=4),
        Layout(dp_replicate=2, dp_shard=2, ep=2),
        Layout(dp_shard=2, tp=2, ep=4),
    ]
    for one in outcomes(tmp_path / "base", [replace(case, layout=each) for each in layouts]):
        check_same(one, alone)


def loss_without_adapters(folder: Path, case: Case, written: Path) -> float:
    """The loss of the base of adapters, which are then written as they were loaded."""
    config, mesh = configuration(folder, case), mesh_of(case.layout)
    built = build_model(config, tokenizer_of_words(), mesh, CPU)
    batches = own_batches(case, mesh)
    trained = total_counts(built, batches)["trained_tokens"]
    with inference(built.model), without_adapters(built.model):
        loss = torch.stack([sums_of(built, batch, LOSS) for batch in batches]).sum()
    dist.all_reduce(loss)
    export_adapter(built.model, tokenizer_of_words(), case.lora, str(folder), str(written))
    return loss.item() / trained.item()


def test_adapters_are_off_and_written_wherever_experts_are(tmp_path: Path) -> None:
    settings = saved("qwen3_moe", tmp_path)
    [plain] = outcomes(tmp_path / "base", [Case()])
    case = Case(TWO, 2, lora=settings)
    off = run_ranks(2, loss_without_adapters, tmp_path / "base", case, tmp_path / "ours")
    assert off == pytest.approx([plain.loss] * 2, rel=1e-6)
    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")
    )
    assert differing(ours, theirs) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_on_with_another_degree_of_expert_parallelism(tmp_path: Path) -> None:
    world, run = make_world(tmp_path), tmp_path / "run"
    random_model(tiny_config("qwen3_moe", vocab_size=257)).save_pretrained(world / "base")
    base = ("--model.name_or_path", world / "base", "--model.config", "none")
    tokenizer = ("--model.tokenizer_path", world / "model")
    adapters = ("--lora.rank", 4, "--lora.targets", "", "--lora.parameters", "*.experts.*")
    start = (*base, *tokenizer, *adapters)
    train(world, run, *start)
    straight, alone = curve(run), load_file(run / "hf" / "model.safetensors")
    two = ("--cpus", 2, "--training.batch_size", 2, "--parallelism.data_parallel_shard_degree", 2)
    spread = (*start, *two, "--parallelism.expert_parallel_degree", 2)
    train(world, tmp_path / "spread", *spread)
    train(world, run, *spread, "--checkpoint.load_step", 4)
    train(world, tmp_path / "spread", *start, "--checkpoint.load_step", 4)
    for name in ("run", "spread"):
        folder = tmp_path / name
        for one, other in zip(curve(folder), straight, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        found = load_file(folder / "hf" / "model.safetensors")
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
        model = AutoModelForCausalLM.from_pretrained(world / "base")
        before = logits(model).detach()
        beside = logits(PeftModel.from_pretrained(model, folder / "hf" / "adapter"))
        merged = logits(AutoModelForCausalLM.from_pretrained(folder / "hf"))
        torch.testing.assert_close(merged, beside, rtol=1e-5, atol=1e-5)
        assert (merged - before).abs().max() > 1e-2
