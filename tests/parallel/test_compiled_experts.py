"""Layers whose experts are gathered by themselves are compiled in parts, to the same training."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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
    compiled_by,
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
Trained = tuple[str, Case]
"""The kind of a model, and what it is trained in."""
FolderOf = Callable[[str], Path]


def three_steps(folder: Path, case: Case) -> Steps:
    """Loss and gradient norm of each step, the weights after them, and how many graphs it took."""
    torch._dynamo.reset()  # nothing that was compiled before is found again
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
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
    return curve, weights, torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


def steps_of_each(trained: list[tuple[Path, Case]]) -> list[Steps]:
    found = []
    for folder, case in trained:
        try:
            with compiled_by(case.backend):
                found.append(three_steps(folder, case))
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return found


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Tells the folder of a model of a kind with random weights."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def made(kind: str) -> Path:
        small = small_config(configuration_class(kind)) if kind == "mixtral" else tiny_config(kind)
        random_model(small, "eager").save_pretrained(root / kind)
        return root / kind

    return made


def check(every: dict[str, Trained], folder_of: FolderOf) -> dict[str, int]:
    """How many graphs ranks compiled at most for each case, which trains as one process does.

    The cases share their processes.
    """
    plain = [*dict.fromkeys((kind, case.lora) for kind, case in every.values())]
    alone = [(folder_of(kind), Case(lora=lora)) for kind, lora in plain]
    [made] = run_ranks(1, steps_of_each, alone)
    wanted = dict(zip(plain, made, strict=True))
    own = [(folder_of(kind), case) for kind, case in every.values()]
    results = zip(*run_ranks(2, steps_of_each, own), strict=True)
    most = {}
    for name, of_ranks in zip(every, results, strict=True):
        kind, case = every[name]
        straight, weights, _ = wanted[kind, case.lora]
        found: dict[str, Tensor] = {}
        for curve, of_rank, _ in of_ranks:
            for one, other in zip(curve, straight, strict=True):
                assert one == pytest.approx(other, rel=EXACT), name
            found |= of_rank
        assert relative_error(found, weights) < EXACT, name
        most[name] = max(graphs for *_, graphs in of_ranks)
        assert most[name] > 0, name
    return most


SLOW = {
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
def test_compiled_mixtures_train_as_one_process(folder_of: FolderOf) -> None:
    """Around the experts, around the exchange, what experts compute, and the norm: six graphs."""
    every = {
        name: (kind, replace(case, backend="aot_eager")) for name, (kind, case) in SLOW.items()
    }
    every["into code"] = "qwen3_moe", Case(TWO, 2, compiled=True, recompute=FULL)
    graphs = check(every, folder_of)
    assert graphs["into code"] <= 6
    assert max(graphs.values()) <= 10, graphs
