"""A step's loss, gradients and update are the same on any number of ranks, in any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lacuna.config.adapters import LoraConfig
from lacuna.parallel.mesh import Layout
from layouts import FOUR_LAYERS, Case, Outcome, check_same, outcomes, pipelined, sequences
from tiny import VOCABULARY, differing, tiny_config


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_config("llama_tied").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model_config: Path) -> Outcome:
    """The step on one rank in one micro-batch."""
    return outcomes(model_config, [Case()])[0]


def test_the_gradient_is_the_mean_over_the_trained_tokens_of_the_step(
    alone: Outcome, model_config: Path
) -> None:
    norms = torch.stack([gradient.double().norm() for gradient in alone.gradients.values()])
    assert alone.norm == pytest.approx(norms.norm().item(), rel=1e-6)
    assert alone.tokens == int((sequences()[2] != -100).sum())
    assert alone.loss == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=0.05)


@pytest.mark.parametrize(
    "cases",
    [
        [Case(Layout(), accumulation) for accumulation in (2, 4, 8)],
        [
            Case(Layout(replicate, 2 // replicate), accumulation)
            for replicate in (1, 2)
            for accumulation in (1, 4)
        ],
        [
            Case(Layout(2, 2), 1),
            Case(Layout(2, 2), 2),
            Case(Layout(1, 4), 2),
            Case(Layout(4, 1), 2),
        ],
    ],
    ids=["one rank", "two ranks", "four ranks"],
)
def test_every_data_parallel_layout_and_accumulation_makes_the_same_step(
    cases: list[Case], alone: Outcome, model_config: Path
) -> None:
    for outcome in outcomes(model_config, cases):
        check_same(outcome, alone)


@pytest.mark.parametrize(
    "architecture",
    ["llama_tied", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "gemma3"))],
)
@pytest.mark.parametrize(
    "cases",
    [
        [Case(Layout(tp=2), 2), Case(Layout(tp=2), parallelism={"disable_loss_parallel": True})],
        [Case(Layout(cp=2), 2), Case(Layout(cp=2, ring=True), 2)],
        [pipelined(Layout(pp=2), 4), pipelined(Layout(pp=2), 4, "Interleaved1F1B")],
    ],
    ids=["tensor", "context", "pipeline"],
)
def test_every_parallelism_makes_the_same_step(
    cases: list[Case], architecture: str, tmp_path: Path
) -> None:
    check_layouts(cases, architecture, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama_tied", "gemma3", "gpt2"])
@pytest.mark.parametrize(
    "cases",
    [
        [
            Case(Layout(dp_shard=2, tp=2), 2),
            Case(Layout(dp_replicate=2, cp=2)),
            Case(Layout(cp=2, tp=2)),
        ],
        [
            pipelined(Layout(dp_shard=2, pp=2), 2),
            pipelined(Layout(tp=2, pp=2), 2),
            pipelined(Layout(cp=2, pp=2), 2),
        ],
    ],
    ids=["pairs", "pairs with a pipeline"],
)
def test_two_parallelisms_make_the_same_step(
    cases: list[Case], architecture: str, tmp_path: Path
) -> None:
    check_layouts(cases, architecture, tmp_path)


def check_layouts(cases: list[Case], architecture: str, tmp_path: Path) -> None:
    tiny_config(
        architecture, num_hidden_layers=4, **FOUR_LAYERS.get(architecture, {})
    ).save_pretrained(tmp_path)
    alone = outcomes(tmp_path, [Case()])[0]
    for outcome in outcomes(tmp_path, cases):
        check_same(outcome, alone)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [{}, {"disable_loss_parallel": True}])
def test_norms_over_all_heads_split_too(loss: dict[str, bool], tmp_path: Path) -> None:
    tiny_config("olmo2").save_pretrained(tmp_path)
    alone, adapted = outcomes(tmp_path, [Case(), Case(lora=LoraConfig(rank=3))])
    layouts = [
        Case(Layout(tp=2), 2, parallelism=loss),
        Case(Layout(tp=2), 2, parallelism=loss, lora=LoraConfig(rank=3)),
    ]
    for outcome, expected in zip(outcomes(tmp_path, layouts), (alone, adapted), strict=True):
        check_same(outcome, expected)
    check_same(outcomes(tmp_path, [Case(Layout(dp_shard=2, tp=2), 2, parallelism=loss)])[0], alone)


@pytest.mark.parametrize(
    "architecture", ["gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
)
def test_sinks_and_narrow_values_make_the_same_step(architecture: str, tmp_path: Path) -> None:
    tiny_config(architecture).save_pretrained(tmp_path)
    ring = {"context_parallel_rotate_method": "alltoall"}
    [alone] = outcomes(tmp_path, [Case()])
    layouts = [
        Case(Layout(dp_shard=2), 2),
        Case(Layout(cp=2), 2),
        Case(Layout(cp=2, ring=True), 2, parallelism=ring),
    ]
    for outcome in (
        *outcomes(tmp_path, layouts),
        *outcomes(tmp_path, [pipelined(Layout(pp=2), 4)]),
    ):
        check_same(outcome, alone)


@pytest.mark.parametrize("target", ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"])
def test_a_stage_of_a_pipeline_may_train_nothing(target: str, tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    adapter = LoraConfig(rank=2, targets=(target,))
    [alone] = outcomes(tmp_path, [Case(lora=adapter)])
    check_same(outcomes(tmp_path, [replace(pipelined(Layout(pp=2), 4), lora=adapter)])[0], alone)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama_tied", "gpt2"])
@pytest.mark.parametrize(
    "adapters", [LoraConfig(rank=3), LoraConfig(rank=4, dora=True)], ids=["plain", "dora"]
)
def test_adapters_learn_the_same_in_every_layout(
    adapters: LoraConfig, architecture: str, tmp_path: Path
) -> None:
    tiny_config(architecture).save_pretrained(tmp_path)
    layouts = (Layout(), Layout(tp=2), Layout(dp_shard=2), Layout(cp=2), Layout(pp=2), Layout(2, 2))
    degrees = {"pipeline_parallel_degree": 2}
    alone, *others = (
        outcomes(
            tmp_path,
            [Case(layout, 2, parallelism=degrees if layout.pp > 1 else {}, lora=adapters)],
        )[0]
        for layout in layouts
    )
    assert {name.rpartition(".")[2] for name in alone.gradients} >= {"lora_A", "lora_B"}
    for outcome in others:
        check_same(outcome, alone)


def test_where_parameters_gradients_and_states_are_kept_changes_nothing(
    alone: Outcome, model_config: Path
) -> None:
    layouts = (Layout(1, 2), Layout(2, 1), Layout(tp=2))
    for layout in layouts:
        cases = [
            Case(layout, 2, zero_stage=1),
            Case(layout, 2, zero_stage=2),
            Case(layout, 2, offload=True),
        ]
        for outcome in outcomes(model_config, cases):
            check_same(outcome, alone)


def test_an_early_step_is_the_same_step(model_config: Path) -> None:
    for layout in (Layout(1, 2), Layout(tp=2)):
        late, early = outcomes(
            model_config, [Case(layout, max_norm=0), Case(layout, max_norm=0, early_step=True)]
        )
        assert early.gradients == {} and early.loss == late.loss
        assert differing(early.updated, late.updated) == []


def test_keeping_gathered_parameters_changes_nothing(model_config: Path) -> None:
    kept, freed = outcomes(
        model_config, [Case(Layout(1, 2), 2, zero_stage=stage) for stage in (2, 3)]
    )
    assert (kept.loss, kept.norm) == (freed.loss, freed.norm)
    assert differing(kept.gradients, freed.gradients) == []
    assert differing(kept.updated, freed.updated) == []
