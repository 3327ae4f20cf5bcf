"""Objectives without a run: a model as the loop hands it to them, and batches of given ids."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.data import Batch
from lacuna.data.packing import IGNORED
from lacuna.model.build import BuiltModel
from lacuna.model.forward import attach_forward
from lacuna.model.head import probe_head
from lacuna.parallel.mesh import Layout
from lacuna.parallel.stages import PassThrough, Stage
from tiny import CPU, mesh_of

Piece = tuple[list[int], list[int]]
"""Ids of what is not trained, and of what follows it and is."""


@contextmanager
def one_rank() -> Iterator[None]:
    """Within it this process is a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def policy_of(model: PreTrainedModel, config: Config | None = None) -> BuiltModel:
    """A whole model on this process, as the loop would have built it.

    What the loop adds to the methods of a model is added to this one, in place.
    """
    config = config or Config()
    attach_forward(model)
    stage = Stage(0, model, [], PassThrough(), is_last=True)
    return BuiltModel(
        model=model,
        stages=[stage],
        pipeline=None,
        mesh=mesh_of(Layout()),
        device=CPU,
        head=probe_head(model, compiled=False),
        parameters=0,
        flops=lambda tokens, lengths: 0.0,
        after_update=lambda: None,
        training=config.training,
        parallelism=config.parallelism,
    )


def batch_of(sequences: Sequence[Piece], columns: dict[str, list[float]] | None = None) -> Batch:
    """One row of sequences side by side and two tokens of padding.

    `columns` have a value for every sequence.
    """
    ids: list[int] = []
    labels: list[int] = []
    numbers: list[int] = []
    positions: list[int] = []
    bounds = [0]
    for number, (prompt, answer) in enumerate(sequences):
        whole = prompt + answer
        ids += whole
        labels += [IGNORED] * (len(prompt) - 1) + answer + [IGNORED]
        numbers += [number] * len(whole)
        positions += range(len(whole))
        bounds.append(len(ids))
    rows = {
        "input_ids": [*ids, 0, 0],
        "labels": [*labels, IGNORED, IGNORED],
        "position_ids": [*positions, 0, 1],
        "sequence": [*numbers, 0, 0],
    }
    tensors = {name: torch.tensor([row]) for name, row in rows.items()}
    tensors["real"] = torch.tensor([[True] * len(ids) + [False] * 2])
    bounds.append(len(ids) + 2)
    trained = sum(len(answer) for _, answer in sequences)
    counts = {"tokens": float(len(ids)), "trained_tokens": float(trained), "text_bytes": 0.0}
    return Batch(
        columns=tensors,
        counts=counts | {"pairs": len(sequences) / 2, "sequences": len(sequences) / 2},
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True)),
        sequence_columns={name: torch.tensor(column) for name, column in (columns or {}).items()},
    )


def gradient_norm(model: PreTrainedModel) -> float:
    """The norm of all gradients of a model together."""
    gradients: list[Tensor] = [
        p.grad.double().flatten() for p in model.parameters() if p.grad is not None
    ]
    return torch.cat(gradients).norm().item()
