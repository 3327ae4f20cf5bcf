"""A step's loss, gradients and update are the same on any number of ranks, in any layout, cut in any way."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config import Config
from lacuna.config.machine import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from lacuna.config.sections import ModelConfig, OptimizerConfig, TrainingConfig
from lacuna.data import Batch
from lacuna.model.build import build_model
from lacuna.parallel.mesh import Layout, build_mesh
from lacuna.train.optimizer import build_optimizer
from lacuna.train.step import accumulate_gradients, agree, update
from tiny import CPU, VOCABULARY, differing, relative_error, run_ranks, tiny_config, tokenizer_of_words, whole

LENGTH = 24
SEQUENCES = 8


@dataclass(frozen=True)
class Case:
    """A layout of the data-parallel ranks, the micro-batches of each, the ZeRO stage, and what is recomputed."""

    replicate: int
    accumulation: int
    zero_stage: int = 3
    recompute: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compiled: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one step came to; the tensors are whole."""

    loss: float
    norm: float
    tokens: float
    gradients: dict[str, Tensor]
    updated: dict[str, Tensor]


def sequences() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and labels [8, 24] of two documents each; from all to none of the tokens are trained."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    labels = ids.roll(-1, dims=1)
    for row in range(SEQUENCES):
        labels[row, LENGTH - 4 * row :] = -100  # rows 6 and 7 train on nothing
    first = torch.arange(SEQUENCES) + 5
    columns = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    positions = torch.where(columns < first[:, None], columns, columns - first[:, None])
    labels[positions.roll(-1, dims=1) == 0] = -100
    return ids, positions, labels


def micro_batch(rows: slice) -> Batch:
    ids, positions, labels = (tensor[rows] for tensor in sequences())
    starts = (positions.flatten() == 0).nonzero().flatten()
    bounds = torch.cat([starts, torch.tensor([ids.numel()])]).int()
    return Batch(
        input_ids=ids, labels=labels, position_ids=positions, cu_seqlens=bounds, max_seqlen=int(bounds.diff().max()),
        tokens=ids.numel(), trained_tokens=int((labels != -100).sum()), text_bytes=0.0, source_tokens=(ids.numel(),),
    )  # fmt: skip


def one_step(model_config: Path, case: Case) -> Outcome:
    """Trains one step on the eight sequences, this rank and each micro-batch on their share."""
    config = Config(
        model=ModelConfig(config=str(model_config)),
        training=TrainingConfig(seq_len=LENGTH, max_norm=0.5),
        optimizer=OptimizerConfig(lr=0.1, eps=1e-2),  # a small eps would blow up rounding where gradients are zero
        parallelism=ParallelismConfig(zero_stage=case.zero_stage),
        activation_checkpoint=case.recompute,
        compile=CompileConfig(enable=case.compiled),
    )
    ranks = dist.get_world_size()
    mesh = build_mesh(Layout(case.replicate, ranks // case.replicate), "cpu")
    built = build_model(config, tokenizer_of_words(), mesh, CPU)
    optimizer = build_optimizer(built.model, config)
    size = SEQUENCES // ranks // case.accumulation
    starts = range(dist.get_rank() * size * case.accumulation, SEQUENCES, size)
    batches = [micro_batch(slice(start, start + size)) for start in starts[: case.accumulation]]
    totals = agree(batches, False, False, CPU)
    loss = accumulate_gradients(built, batches, totals[1], CPU)
    dist.all_reduce(loss)
    parameters = dict(built.model.named_parameters())
    gradients = {name: whole(parameter.grad).clone() for name, parameter in parameters.items()}
    norm, skip = update(config, built, optimizer, totals[1], 0.1)
    assert not skip
    updated = {name: whole(parameter).detach().clone() for name, parameter in parameters.items()}
    return Outcome(loss.item() / totals[1].item(), norm.item(), totals[1].item(), gradients, updated)


def steps(model_config: Path, cases: list[Case]) -> list[Outcome]:
    return [one_step(model_config, case) for case in cases]


def outcomes(ranks: int, model_config: Path, cases: list[Case]) -> list[Outcome]:
    """What each case came to; every rank must have come to the same."""
    results = run_ranks(ranks, steps, model_config, cases)
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            assert (mine.loss, mine.norm, mine.tokens) == (first.loss, first.norm, first.tokens)
            assert differing(mine.updated, first.updated) == []
    return results[0]


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_config("llama_tied").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model_config: Path) -> Outcome:
    """The step on one rank in one micro-batch."""
    return outcomes(1, model_config, [Case(replicate=1, accumulation=1)])[0]


def check_same(outcome: Outcome, alone: Outcome) -> None:
    assert outcome.tokens == alone.tokens
    assert outcome.loss == pytest.approx(alone.loss, rel=1e-6)
    assert outcome.norm == pytest.approx(alone.norm, rel=1e-6)
    assert relative_error(outcome.gradients, alone.gradients) < 1e-6
    assert relative_error(outcome.updated, alone.updated) < 1e-6


def test_the_gradient_is_the_mean_over_the_trained_tokens_of_the_step(alone: Outcome, model_config: Path) -> None:
    norms = torch.stack([gradient.double().norm() for gradient in alone.gradients.values()])
    assert alone.norm == pytest.approx(norms.norm().item(), rel=1e-6)
    assert alone.tokens == int((sequences()[2] != -100).sum())
    assert alone.loss == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [Case(replicate=1, accumulation=accumulation) for accumulation in (2, 4, 8)]),
        (2, [Case(replicate=1, accumulation=1), Case(1, 4), Case(replicate=2, accumulation=1), Case(2, 4)]),
        (4, [Case(replicate=2, accumulation=1), Case(replicate=2, accumulation=2), Case(1, 2), Case(4, 2)]),
    ],
    ids=["one rank", "two ranks", "four ranks"],
)
def test_every_layout_and_accumulation_makes_the_same_step(
    ranks: int, cases: list[Case], alone: Outcome, model_config: Path
) -> None:
    for outcome in outcomes(ranks, model_config, cases):
        check_same(outcome, alone)


def test_keeping_gathered_parameters_changes_nothing(model_config: Path) -> None:
    kept, freed = outcomes(2, model_config, [Case(1, 2, zero_stage=2), Case(1, 2, zero_stage=3)])
    assert (kept.loss, kept.norm) == (freed.loss, freed.norm)
    assert differing(kept.gradients, freed.gradients) == []
    assert differing(kept.updated, freed.updated) == []
