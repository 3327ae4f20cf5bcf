"""Layers whose experts are gathered by themselves are compiled in parts, to the same training."""

from collections.abc import Callable
from functools import cache, partialmethod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from every_model import configuration_class, small_config
from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model.build import build_model
from lacuna.parallel.mesh import Layout
from lacuna.train.optimizer import build_optimizer, update
from lacuna.train.step import accumulate_gradients, total_counts
from layouts import LOSS, Case, configuration, own_batches
from tiny import (
    CPU,
    mesh_of,
    random_model,
    relative_error,
    run_ranks,
    tiny_config,
    tokenizer_of_words,
    whole,
)

EXACT = 1e-5
FULL = ActivationCheckpointConfig(mode="full")
BY_OPERATION = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
STACKS = LoraConfig(rank=3, parameters=("*.experts.*",))
TWO = Layout(dp_shard=2, ep=2)

Steps = tuple[list[tuple[float, float]], dict[str, Tensor], int]
AloneOf = Callable[[str, LoraConfig], tuple[Path, Steps]]


def three_steps(folder: Path, case: Case, backend: str = "inductor") -> Steps:
    """Loss and gradient norm of each step, the weights after them, and how many graphs it took."""
    nn.Module.compile = partialmethod(nn.Module.compile, backend=backend)
    config, mesh = configuration(folder, case), mesh_of(case.layout)
    built = build_model(config, tokenizer_of_words(), mesh, CPU)
    optimizer = build_optimizer(built.model, config.optimizer)
    curve = []
    for seed in range(3):
        batches = own_batches(case, mesh, seed)
        trained = total_counts(built, batches)["trained_tokens"]
        loss, *_ = accumulate_gradients(built, batches, LOSS, trained)
        dist.all_reduce(loss)
        norm, _ = update(built, optimizer, trained)
        curve.append((loss.item() / trained.item(), norm.item()))
    weights = {name: whole(one).detach().clone() for name, one in built.model.named_parameters()}
    return curve, weights, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def alone_of(tmp_path_factory: pytest.TempPathFactory) -> AloneOf:
    """Tells the folder of a model of a kind, and its steps in one process, which are made once."""
    root = tmp_path_factory.mktemp("alone")

    @cache
    def made(kind: str, lora: LoraConfig) -> tuple[Path, Steps]:
        folder = root / kind
        small = small_config(configuration_class(kind)) if kind == "mixtral" else tiny_config(kind)
        random_model(small, "eager").save_pretrained(folder)
        [steps] = run_ranks(1, three_steps, folder, Case(lora=lora))
        return folder, steps

    return made


def check(kind: str, case: Case, alone_of: AloneOf, backend: str = "inductor") -> int:
    """How many graphs ranks compiled at most for a case that trains as one process does."""
    folder, (straight, alone, _) = alone_of(kind, case.lora)
    ranks = case.layout.data_parallel * case.layout.sharing
    found: dict[str, Tensor] = {}
    most = 0
    for curve, weights, graphs in run_ranks(ranks, three_steps, folder, case, backend):
        most = max(most, graphs)
        for one, other in zip(curve, straight, strict=True):
            assert one == pytest.approx(other, rel=EXACT)
        found |= weights
    assert relative_error(found, alone) < EXACT
    return most


@pytest.mark.slow
def test_layers_with_spread_experts_are_compiled_once(alone_of: AloneOf) -> None:
    """Around the experts, around the exchange, what experts compute, and the norm: six graphs."""
    assert check("qwen3_moe", Case(TWO, 2, compiled=True, recompute=FULL), alone_of) <= 6


SLOW = {
    "split": ("qwen3_moe", Case(Layout(tp=2), compiled=True)),
    "split, by operation": ("qwen3_moe", Case(Layout(tp=2), compiled=True, recompute=BY_OPERATION)),
    "spread, by operation": ("qwen3_moe", Case(TWO, 2, compiled=True, recompute=BY_OPERATION)),
    "biases, by operation": ("gpt_oss", Case(TWO, compiled=True, recompute=BY_OPERATION)),
    "shared, by operation": ("deepseek_v3", Case(TWO, 2, compiled=True, recompute=BY_OPERATION)),
    "split and spread": ("qwen3_moe", Case(Layout(tp=2, ep=2), compiled=True)),
    "cp": ("qwen3_moe", Case(Layout(cp=2, ep=2), 2, compiled=True)),
    "adapters of experts": ("qwen3_moe", Case(TWO, 2, compiled=True, lora=STACKS, recompute=FULL)),
    "biases": ("gpt_oss", Case(TWO, 2, compiled=True, lora=STACKS)),
    "mixtral": ("mixtral", Case(TWO, 2, compiled=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_compiled_mixtures_train_as_one_process(name: str, alone_of: AloneOf) -> None:
    kind, case = SLOW[name]
    # Graphs are the same whoever makes code of them, which takes long.
    backend = "inductor" if name in ("cp", "split", "adapters of experts") else "aot_eager"
    assert check(kind, case, alone_of, backend) <= 10
