"""Experts that are balanced by force get equally many tokens, and routers keep their gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from every_model import configuration_class, small_config
from lacuna.config import UserError
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.model.balanced_experts import balance_experts
from lacuna.model.build import build_model
from lacuna.model.router_kinds import routers_of
from lacuna.model.router_load import RouterLoad
from lacuna.parallel.expert_stacks import stacks_of
from lacuna.parallel.mesh import Layout
from lacuna.train.step import accumulate_gradients, total_counts
from layouts import LOSS, Case, configuration, own_batches
from tiny import (
    CPU,
    compiled_by,
    mesh_of,
    random_model,
    run_ranks,
    tiny_config,
    tokenizer_of_words,
    whole,
)

KINDS = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
QUICK = ("mixtral", "deepseek_v3", "gpt_oss")
TINY = ("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss")
Step = tuple[float, dict[str, object], dict[str, Tensor], dict[str, Tensor]]


def saved(kind: str, folder: Path) -> Path:
    own = tiny_config(kind) if kind in TINY else small_config(configuration_class(kind))
    own.use_cache = False
    random_model(own, "eager").save_pretrained(folder)
    return folder


def balanced_step(folder: Path, case: Case) -> Step:
    """The loss, the load, and the gradients of routers and of experts after one balanced pass."""
    mesh = mesh_of(case.layout)
    with compiled_by(case.backend):
        built = build_model(configuration(folder, case), tokenizer_of_words(), mesh, CPU)
    load = None if case.compiled else RouterLoad(built, 0.0, reported=True)
    balance_experts(built.model)
    batches = own_batches(case, mesh)
    trained = total_counts(built, batches)["trained_tokens"]
    sums = accumulate_gradients(built, batches, LOSS, trained)
    torch.distributed.all_reduce(sums)
    row: dict[str, object] = {}
    if load is not None:
        load.after_step(torch.zeros(()))
        row = load.report()
    layers = decoder_layers(built.model)
    gates = [router for layer in layers for router, _ in routers_of(built.model, layer)]
    kinds = (gates, stacks_of([built.model]))
    of_gates, of_experts = (
        {
            f"{place}.{name}": whole(weight.grad)
            for place, module in enumerate(modules)
            for name, weight in module.named_parameters()
            if weight.grad is not None
        }
        for modules in kinds
    )
    return sums[0].item(), row, of_gates, of_experts


def balanced_steps(folders: list[Path], case: Case) -> list[Step]:
    return [balanced_step(folder, case) for folder in folders]


def check_same(ours: Step, theirs: Step) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    for mine, other in zip(ours[2:], theirs[2:], strict=True):
        assert mine.keys() == other.keys() and mine
        for name in other:
            torch.testing.assert_close(mine[name], other[name], rtol=1e-4, atol=1e-7)


def check_kinds(kinds: tuple[str, ...], folder: Path) -> None:
    folders = [saved(kind, folder / kind) for kind in kinds]
    [alone] = run_ranks(1, balanced_steps, folders, Case())
    first, second = run_ranks(2, balanced_steps, folders, Case(Layout(dp_shard=2, ep=2), 2))
    for kind, one, left, right in zip(kinds, alone, first, second, strict=True):
        _, row, of_gates, _ = one
        assert row["router_violation"] == 0, kind
        loads = [value for name, value in row.items() if name.startswith("router_load")]
        assert loads and all(len({*load}) == 1 for load in loads)
        assert all(gradient.abs().max() > 0 for gradient in of_gates.values()), kind
        assert left[1] == right[1] and left[1]["router_violation"] == 0
        check_same(left, one)


def test_experts_are_balanced_exactly_alone_and_on_two_ranks(tmp_path: Path) -> None:
    check_kinds(QUICK, tmp_path)


@pytest.mark.slow
def test_those_of_every_family_are_balanced_exactly(tmp_path: Path) -> None:
    check_kinds(tuple(kind for kind in KINDS if kind not in QUICK), tmp_path)


def check_alike(folder: Path, case: Case) -> None:
    [[alone]] = run_ranks(1, balanced_steps, [saved("qwen3_moe", folder)], Case())
    [[other]] = run_ranks(1, balanced_steps, [folder], case)
    check_same(other, alone)


def test_recomputed_layers_are_balanced_too(tmp_path: Path) -> None:
    check_alike(tmp_path, Case(recompute=ActivationCheckpointConfig(mode="full")))


@pytest.mark.slow
def test_compiled_layers_are_balanced_too(tmp_path: Path) -> None:
    check_alike(tmp_path, Case(compiled=True, backend="aot_eager"))


def test_choices_begin_anew_with_each_pass_and_differ_for_a_token(tmp_path: Path) -> None:
    model = random_model(tiny_config("qwen3_moe"), "eager")
    balance_experts(model)
    chosen: list[Tensor] = []
    for stack in stacks_of([model]):
        stack.register_forward_pre_hook(lambda _, arguments: chosen.append(arguments[1]))
    for _ in range(2):
        model(input_ids=torch.arange(5)[None] + 4)
    expected = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]])
    assert len(chosen) == 4 and all(torch.equal(one, expected) for one in chosen)


def test_a_dense_model_is_refused() -> None:
    model = meta_model(tiny_config("llama"), None, torch.float32)
    with pytest.raises(UserError, match="bench: --balanced-experts: LlamaForCausalLM has no stack"):
        balance_experts(model)
