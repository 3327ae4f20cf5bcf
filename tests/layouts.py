"""One training step on the same sequences in any layout, to be compared with one rank's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.config.adapters import LoraConfig, QuantizationConfig
from lacuna.config.machine import (
    ActivationCheckpointConfig,
    CompileConfig,
    Float8Config,
    ParallelismConfig,
)
from lacuna.config.optimizers import OptimizerConfig
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.data import Batch
from lacuna.model.build import build_model
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.train.optimizer import build_optimizer, update
from lacuna.train.step import accumulate_gradients, total_counts
from tiny import (
    CPU,
    VOCABULARY,
    compiled_by,
    differing,
    mesh_of,
    own_loss,
    relative_error,
    run_ranks,
    tokenizer_of_words,
    whole,
)

LOSS = LanguageModelling.loss
LENGTH = 24
SEQUENCES = 8
FOUR_LAYERS = {
    "gemma3": {
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "full_attention",
            "sliding_attention",
        ]
    }
}
"""Settings that an architecture needs beside the number if it is to have four layers."""


@dataclass(frozen=True)
class Case:
    """A layout and the settings that are to make no difference in it."""

    layout: Layout = Layout()
    accumulation: int = 1
    zero_stage: int = 3
    parallelism: dict[str, Any] = field(default_factory=dict)
    max_norm: float = 0.5
    offload: bool = False
    early_step: bool = False
    recompute: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compiled: bool = False
    backend: Literal["inductor", "aot_eager"] = "inductor"
    lora: LoraConfig = LoraConfig()
    base: Literal["none", "int8", "nf4"] = "none"
    float8: Float8Config = Float8Config()
    precision: Literal["bfloat16", "float32"] | None = None
    dtype: Literal["bfloat16", "float32"] = "float32"
    padded: bool = False


@dataclass(frozen=True)
class Outcome:
    """The results of one step; the tensors are whole."""

    loss: float
    norm: float
    tokens: float
    gradients: dict[str, Tensor]
    updated: dict[str, Tensor]


def pipeline(
    schedule: str, ranks: int, file: Path | None = None, points: Sequence[str] = ()
) -> ParallelismConfig:
    """The settings of a pipeline."""
    return ParallelismConfig(
        pipeline_parallel_degree=ranks,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_schedule_csv=file and str(file),
        pipeline_parallel_split_points=points,
    )


def pipelined(layout: Layout, microbatches: int, schedule: str = "1F1B") -> Case:
    """A case with a pipeline."""
    settings = {"pipeline_parallel_degree": layout.pp, "pipeline_parallel_schedule": schedule}
    return Case(layout, microbatches, parallelism=settings)


def sequences(seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and labels [8, 24]; each sequence has two documents.

    From all to none of a sequence's tokens are trained.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    labels = ids.roll(-1, dims=1)
    for row in range(SEQUENCES):
        labels[row, LENGTH - 4 * row :] = -100  # rows 6 and 7 train on nothing
    first = torch.arange(SEQUENCES) + 5
    columns = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    positions = torch.where(columns < first[:, None], columns, columns - first[:, None])
    labels[positions.roll(-1, dims=1) == 0] = -100
    return ids, positions, labels


def alone_loss(model: PreTrainedModel, tokens: float) -> float:
    """The loss of the sequences per token by a model's own code, document by document.

    Adds its gradient to those of the model, in place.
    """
    ids, positions, labels = sequences()
    total = 0.0
    for row in range(len(ids)):
        first = int((positions[row, 1:] == 0).nonzero()[0]) + 1
        for piece in (slice(0, first), slice(first, None)):
            if (labels[row, piece] != -100).any():
                own = (each[row : row + 1, piece] for each in (ids, positions, labels))
                loss = own_loss(model, *own) / tokens
                loss.backward()
                total += loss.item()
    return total


def micro_batch(rows: slice, seed: int = 3, packed: bool = True, padded: bool = False) -> Batch:
    """Some of the sequences; each is one document unless they are `packed`.

    If they are `padded`, some tokens at the ends of all but the first pass for padding.
    """
    ids, positions, labels = (tensor[rows] for tensor in sequences(seed))
    if not packed:
        positions = torch.arange(LENGTH).expand_as(ids)
        labels = labels.masked_fill(positions == LENGTH - 1, -100)
    starts = (positions.flatten() == 0).nonzero().flatten()
    bounds = torch.cat([starts, torch.tensor([ids.numel()])]).int()
    real = torch.ones_like(ids, dtype=torch.bool)
    if padded:
        real = torch.arange(LENGTH) < LENGTH - 3 * torch.arange(SEQUENCES)[rows, None]
    columns = {"input_ids": ids, "labels": labels, "position_ids": positions, "real": real}
    counts = {
        "tokens": ids.numel(),
        "trained_tokens": int((labels != -100).sum()),
        "text_bytes": 0.0,
    }
    return Batch(columns, counts | {"source_0": ids.numel()}, bounds, int(bounds.diff().max()))


def configuration(model: Path, case: Case) -> Config:
    """The run of a case; it starts from the weights in the folder `model` where there are any."""
    source = "name_or_path" if (model / "model.safetensors").exists() else "config"
    # A small eps would blow up rounding where gradients are zero.
    optimizer = OptimizerConfig(lr=0.1, eps=1e-2, early_step_in_backward=case.early_step)
    return Config(
        model=ModelConfig(**{source: str(model)}),
        training=TrainingConfig(
            seq_len=LENGTH,
            max_norm=case.max_norm,
            enable_cpu_offload=case.offload,
            mixed_precision_param=case.precision,
            dtype=case.dtype,
        ),
        optimizer=optimizer,
        parallelism=ParallelismConfig(zero_stage=case.zero_stage, **case.parallelism),
        activation_checkpoint=case.recompute,
        compile=CompileConfig(enable=case.compiled),
        lora=case.lora,
        quantization=QuantizationConfig(base=case.base),
        float8=case.float8,
    )


def own_batches(case: Case, mesh: Mesh, seed: int = 3, packed: bool = True) -> list[Batch]:
    """This rank's micro-batches of the eight sequences."""
    size = SEQUENCES // case.layout.data_parallel // case.accumulation
    starts = range(mesh.data_rank * size * case.accumulation, SEQUENCES, size)
    return [
        micro_batch(slice(start, start + size), seed, packed, case.padded)
        for start in starts[: case.accumulation]
    ]


def one_step(model_config: Path, case: Case) -> Outcome:
    """Trains one step on the eight sequences, this rank and each micro-batch on their share."""
    with compiled_by(case.backend):
        return _one_step(model_config, case)


def _one_step(model_config: Path, case: Case) -> Outcome:
    config, mesh = configuration(model_config, case), mesh_of(case.layout)
    if case.compiled:
        torch._dynamo.reset()  # of what a case before it had compiled
    built = build_model(config, tokenizer_of_words(), mesh, CPU)
    optimizer = build_optimizer(built.model, config.optimizer)
    batches = own_batches(case, mesh)
    trained = total_counts(built, batches)["trained_tokens"]
    loss, *_ = accumulate_gradients(built, batches, LOSS, trained)
    dist.all_reduce(loss)
    parameters = dict(built.model.named_parameters())
    gradients = {
        name: whole(parameter.grad).clone()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    norm, skip = update(built, optimizer, trained)
    assert not skip
    updated = {name: whole(parameter).detach().clone() for name, parameter in parameters.items()}
    if case.base != "none":  # bytes that pass for numbers may look like no number
        updated = {
            name: one if parameters[name].requires_grad else one.view(torch.uint8)
            for name, one in updated.items()
        }
    return Outcome(loss.item() / trained.item(), norm.item(), trained.item(), gradients, updated)


def steps(model_config: Path, cases: list[Case]) -> list[Outcome]:
    return [one_step(model_config, case) for case in cases]


def outcomes(model_config: Path, cases: list[Case]) -> list[Outcome]:
    """The results of each case; all cases take the same number of ranks.

    What several ranks know must be equal on all of them.
    """
    ranks = {case.layout.data_parallel * case.layout.sharing for case in cases}
    results = run_ranks(ranks.pop(), steps, model_config, cases)
    assert not ranks
    return [merge(of_ranks) for of_ranks in zip(*results, strict=True)]


def merge(of_ranks: Sequence[Outcome]) -> Outcome:
    """Makes one outcome of those of all ranks, which may have different layers."""
    first, *others = of_ranks
    for other in others:
        assert (other.loss, other.norm, other.tokens) == (first.loss, first.norm, first.tokens)
        for mine, whole_model in (
            (other.gradients, first.gradients),
            (other.updated, first.updated),
        ):
            both = mine.keys() & whole_model.keys()
            assert (
                differing(
                    {name: mine[name] for name in both}, {name: whole_model[name] for name in both}
                )
                == []
            )
            whole_model.update(mine)
    return first


def check_same(outcome: Outcome, alone: Outcome) -> None:
    assert outcome.tokens == alone.tokens
    assert outcome.loss == pytest.approx(alone.loss, rel=1e-6)
    assert outcome.norm == pytest.approx(alone.norm, rel=1e-6)
    assert relative_error(outcome.gradients, alone.gradients) < 1e-6
    assert relative_error(outcome.updated, alone.updated) < 1e-6
