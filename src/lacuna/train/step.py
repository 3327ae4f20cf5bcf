"""One optimizer step: micro-batches in, gradients summed over ranks, one update, and its news."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config import Config
from lacuna.data import Batch
from lacuna.model.build import BuiltModel
from lacuna.objective.language_modelling import language_modelling_loss, to_device
from lacuna.train.optimizer import clip_gradients, optimizer_step


class Status(NamedTuple):
    """What all ranks know of a step once its numbers are on the host; `stop` and `save` count the ranks that ask."""

    tokens: float
    trained_tokens: float
    stop: float
    save: float
    finite: float
    skipped: float
    skipped_in_a_row: float


def count_skip(skipped: Tensor, skip: Tensor) -> Tensor:
    """[skipped steps, those in a row] on the device after one more step, which was skipped if `skip` is 1."""
    return torch.stack([skipped[0] + skip, (skipped[1] + 1) * skip])


def agree(batches: Sequence[Batch], stop: bool, save: bool, device: torch.device) -> Tensor:
    """Float64 [tokens, trained tokens, stop, save, tokens of each source...] on the device.

    All are summed over micro-batches and ranks.
    """
    tokens = sum(batch.tokens for batch in batches)
    trained = sum(batch.trained_tokens for batch in batches)
    sources = map(sum, zip(*(batch.source_tokens for batch in batches), strict=True))
    totals = to_device(torch.tensor([tokens, trained, stop, save, *sources], dtype=torch.float64), device)
    dist.all_reduce(totals)
    return totals


def accumulate_gradients(built: BuiltModel, batches: Sequence[Batch], trained: Tensor, device: torch.device) -> Tensor:
    """Backward over the micro-batches; returns this rank's summed loss.

    Every micro-batch's summed loss is divided by the trained tokens of the whole step over all ranks, and gradients
    are summed over ranks, so that neither accumulation nor the number of ranks weighs tokens differently
    (transformers issue 34191).
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    divisor = trained.clamp(min=1).float()
    for index, batch in enumerate(batches):
        # Replicas exchange gradients once a step; shards are reduced every time, which bounds memory.
        built.model.set_requires_all_reduce(index == len(batches) - 1)
        loss = language_modelling_loss(built, batch, device)
        (loss / divisor).backward()
        total += loss.detach()
    return total


def update(
    config: Config, built: BuiltModel, optimizer: torch.optim.Optimizer, trained: Tensor, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """Clips and updates in place. Returns the gradient norm before clipping, and whether the step was skipped (1, 0).

    A step without trained tokens is skipped; so is one whose norm is not finite, with `training.skip_nan_inf`.
    """
    norm = clip_gradients(built.model, config.training.max_norm)
    skip = trained == 0
    if config.training.skip_nan_inf:
        skip = skip | ~torch.isfinite(norm)
    skip = skip.float()
    optimizer_step(optimizer, learning_rate, skip)
    return norm, skip
