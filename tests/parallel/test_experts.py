"""Experts that are spread over ranks compute, train, load and save as those of one process do."""

from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from every_model import configuration_class, small_config
from lacuna.config import UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import ActivationCheckpointConfig, ParallelismConfig
from lacuna.config.optimizers import OptimizerConfig
from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.model.build import build_model
from lacuna.parallel.experts import check_experts
from lacuna.parallel.mesh import Layout, resolve_layout
from lacuna.train.step import sums_of
from layouts import (
    LOSS,
    Case,
    check_same,
    configuration,
    one_step,
    outcomes,
    own_batches,
    pipelined,
)
from optimizer_steps import three_steps
from tiny import (
    mesh_of,
    random_model,
    relative_error,
    run_ranks,
    tiny_config,
    tokenizer_of_words,
)

KINDS = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
TINY = ("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss")


def config_of(kind: str) -> PretrainedConfig:
    own = tiny_config(kind) if kind in TINY else small_config(configuration_class(kind))
    own.use_cache = False
    return own


def saved(kind: str, folder: Path) -> Path:
    random_model(config_of(kind), "eager").save_pretrained(folder)
    return folder


EVERY_LAYER = ActivationCheckpointConfig(mode="selective", selective_ac_option="1")
BY_OPERATION = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
RING = {"context_parallel_rotate_method": "alltoall"}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "mixtral" else pytest.mark.slow) for kind in KINDS],
)
def test_two_ranks_train_the_experts_of_one_process(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    [together] = outcomes(tmp_path, [Case(Layout(dp_shard=2, ep=2), 2)])
    check_same(together, alone)


WITH_A_PLAN = ("mixtral", "qwen2_moe", "olmoe", "glm4_moe")


def test_experts_of_split_layers_are_whole_between_the_passes_only_where_asked(
    tmp_path: Path,
) -> None:
    saved("mixtral", tmp_path)
    for are_whole in run_ranks(2, are_whole_after_forward, tmp_path):
        assert are_whole == {3: False, 2: True}


def are_whole_after_forward(model_config: Path) -> dict[int, bool]:
    """Whether experts are gathered when a forward pass is over, by stage of ZeRO."""
    found = {}
    for stage in (3, 2):
        case = Case(Layout(tp=2), zero_stage=stage)
        config, mesh = configuration(model_config, case), mesh_of(case.layout)
        built = build_model(config, tokenizer_of_words(), mesh, torch.device("cpu"))
        [batch] = own_batches(case, mesh)
        sums_of(built, batch, LOSS)
        stacks = [name for name, _ in built.model.named_parameters() if "experts" in name]
        found[stage] = not any(isinstance(built.model.get_parameter(n), DTensor) for n in stacks)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_A_PLAN)
def test_ranks_that_split_matrices_share_the_tokens_of_experts(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    for one in outcomes(tmp_path, [SPLIT["whole"], SPLIT["spread"]]):
        check_same(one, alone)


TWO = Layout(dp_shard=2, ep=2)
ON_TWO = {
    "ZeRO-1": Case(TWO, 2, zero_stage=1),
    "ZeRO-2": Case(TWO, 2, zero_stage=2),
    "offloaded": Case(TWO, 2, offload=True),
    "recomputed": Case(TWO, 2, recompute=ActivationCheckpointConfig(mode="full")),
    "every layer recomputed": Case(TWO, 2, recompute=EVERY_LAYER),
    "by operation": Case(TWO, 2, recompute=BY_OPERATION),
    "cp": Case(Layout(cp=2, ep=2), 2),
    "ring": Case(Layout(cp=2, ring=True, ep=2), 2, parallelism=RING),
}
SPLIT = {
    "whole": Case(Layout(tp=2)),
    "spread": Case(Layout(tp=2, ep=2)),
    "recomputed": Case(Layout(tp=2, ep=2), 2, recompute=ActivationCheckpointConfig(mode="full")),
    "by operation": Case(Layout(tp=2), 2, recompute=BY_OPERATION),
    "spread, by operation": Case(Layout(tp=2, ep=2), 2, recompute=BY_OPERATION),
    "ZeRO-2": Case(Layout(tp=2), 2, zero_stage=2),
}
ON_FOUR = {
    "half": Case(Layout(dp_shard=4, ep=2)),
    "all": Case(Layout(dp_shard=4, ep=4)),
    "HSDP": Case(Layout(dp_replicate=2, dp_shard=2, ep=2)),
    "cp": Case(Layout(dp_shard=2, cp=2, ep=4), 2),
    "pp": pipelined(Layout(dp_shard=2, pp=2, ep=2), 4),
    "tp": Case(Layout(dp_shard=2, tp=2)),
    "tp, half": Case(Layout(dp_shard=2, tp=2, ep=2), 2),
    "tp, all": Case(Layout(dp_replicate=2, tp=2, ep=2)),
    "tp and cp": Case(Layout(cp=2, tp=2, ep=4)),
    "tp and pp": pipelined(Layout(pp=2, tp=2, ep=2), 4),
    "interleaved": pipelined(Layout(dp_shard=2, pp=2, ep=2), 4, "Interleaved1F1B"),
}


@pytest.mark.slow
def test_any_layout_of_two_ranks_is_one_process(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    for one in outcomes(tmp_path, [*ON_TWO.values(), *SPLIT.values()]):
        check_same(one, alone)


def test_experts_that_one_rank_has_cast_their_weights_as_sharding_does(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    [alone] = outcomes(tmp_path, [Case(precision="bfloat16")])
    [exact] = outcomes(tmp_path, [Case()])
    [sharded, kept] = outcomes(
        tmp_path,
        [Case(TWO, precision="bfloat16", offload=True), Case(TWO, precision="bfloat16")],
    )
    far = relative_error(alone.gradients, exact.gradients)
    for one in (sharded, kept):
        assert {weight.dtype for weight in one.gradients.values()} == {torch.float32}
        assert one.loss == pytest.approx(alone.loss, rel=1e-3)
        assert relative_error(one.gradients, alone.gradients) < 1.5 * far
        assert relative_error(one.gradients, exact.gradients) > far / 10


def test_experts_are_updated_in_the_backward_pass_where_that_is_asked_for(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    [alone] = outcomes(tmp_path, [Case(early_step=True)])
    for one in outcomes(tmp_path, [Case(TWO, early_step=True)]):
        assert relative_error(one.updated, alone.updated) < 1e-6


def works_after_a_step(folder: Path, cases: list[Case]) -> list[int]:
    """How many collectives nobody has waited for after a step of each case."""
    unwaited = []
    for case in cases:
        one_step(folder, case)
        unwaited.append(_get_work_registry_size())
    return unwaited


def test_recomputation_leaves_no_collective_behind(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    kept = Case(TWO, 2, recompute=ActivationCheckpointConfig(mode="selective"))
    cases = [*(ON_TWO[name] for name in ("recomputed", "every layer recomputed", "by operation"))]
    cases.append(kept)
    assert run_ranks(2, works_after_a_step, tmp_path, cases) == [[0] * 4] * 2


@pytest.mark.slow
def test_any_layout_of_four_ranks_is_one_process(tmp_path: Path) -> None:
    model = tiny_config("qwen3_moe", num_hidden_layers=4)
    random_model(model, "eager").save_pretrained(tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    for one in outcomes(tmp_path, [*ON_FOUR.values()]):
        check_same(one, alone)


def test_a_rank_that_no_token_is_sent_to_takes_part(tmp_path: Path) -> None:
    model = random_model(tiny_config("qwen3_moe"), "eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # every token goes to the same two experts
    model.save_pretrained(tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    gradient = alone.gradients["model.layers.0.mlp.experts.gate_up_proj"]
    assert {bool(half.any()) for half in gradient.split(2)} == {True, False}
    for one in outcomes(tmp_path, [Case(TWO, 2), Case(TWO, 2, recompute=EVERY_LAYER)]):
        check_same(one, alone)


@pytest.mark.slow
def test_adapters_beside_spread_experts_are_those_of_one_process(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    adapters = LoraConfig(rank=3)
    [alone] = outcomes(tmp_path, [Case(lora=adapters)])
    split = [Case(Layout(tp=2), lora=adapters), Case(Layout(tp=2, ep=2), lora=adapters)]
    for one in outcomes(tmp_path, [Case(TWO, 2, lora=adapters), *split]):
        check_same(one, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "Muon"},
        {"state_dtype": "int8"},
        {"state_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_other_optimizers_make_the_same_steps(settings: dict[str, str], tmp_path: Path) -> None:
    tiny_config("qwen3_moe", hidden_size=256, head_dim=64).save_pretrained(tmp_path)
    optimizer = OptimizerConfig(**settings, lr=1e-2, weight_decay=0.3)
    [(_, alone)] = run_ranks(1, three_steps, tmp_path, [Case()], optimizer)[0]
    cases = [Case(TWO), Case(Layout(tp=2)), Case(Layout(tp=2, ep=2))]
    for found in run_ranks(2, three_steps, tmp_path, cases, optimizer):
        for _, after in found:
            assert relative_error(after, alone) < 1e-6


@pytest.mark.slow
def test_the_load_balancing_loss_is_that_of_one_process(tmp_path: Path) -> None:
    model = tiny_config("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    random_model(model, "eager").save_pretrained(tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    for one in outcomes(
        tmp_path,
        [
            Case(TWO),
            Case(Layout(cp=2, ring=True, ep=2), parallelism=RING),
            Case(Layout(tp=2)),
            Case(Layout(tp=2, ep=2)),
            Case(Layout(tp=2), parallelism={"disable_loss_parallel": True}),
        ],
    ):
        check_same(one, alone)


@pytest.mark.parametrize(
    ("kind", "layout", "changes", "reason"),
    [
        ("llama", Layout(dp_shard=2, ep=2), {}, "have no stacks of experts"),
        ("qwen3_moe", Layout(dp_shard=3, ep=3), {}, "choose a degree that divides 4"),
        ("qwen3_moe", Layout(dp_shard=8, ep=4), {}, "data_parallel_replicate_degree for the rest"),
        ("qwen3_moe", Layout(dp_shard=2, ep=4), {}, "does not divide data_parallel_shard_degree"),
        (
            "qwen3_moe",
            Layout(dp_shard=2, pp=2, ep=2),
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
            "set the second to 1F1B",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_with_what_to_set(
    kind: str, layout: Layout, changes: dict[str, object], reason: str
) -> None:
    settings = ParallelismConfig(**changes)
    layers = decoder_layers(meta_model(tiny_config(kind), "sdpa", torch.float32))
    with pytest.raises(UserError, match=f"parallelism.expert_parallel_degree.*{reason}"):
        check_experts(layers, kind, layout, settings)
    assert resolve_layout(ParallelismConfig(expert_parallel_degree=2), 2).ep == 2
