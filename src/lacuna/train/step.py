"""Batches through the model: gradients summed over ranks, or the losses of held-out ones or of documents."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config.documents import PackingConfig
from lacuna.data import Batch
from lacuna.data.packing import Span
from lacuna.data.plan import Plan
from lacuna.model.build import BuiltModel
from lacuna.model.head import TokenLoss
from lacuna.model.inputs import to_device
from lacuna.parallel.fsdp import exchange_gradients, inference
from lacuna.parallel.pipeline import add_tied_gradients


def total_counts(built: BuiltModel, batches: Sequence[Batch], **votes: bool) -> dict[str, Tensor]:
    """The counts of a step's batches by name, summed over micro-batches and ranks; float64 scalars on the device.

    So are the `votes` of the ranks: how many of them wanted something.
    """
    totals = {
        name: sum(batch.counts[name] for batch in batches) for name in batches[0].counts
    } | votes
    summed = to_device(torch.tensor([*totals.values()], dtype=torch.float64), built.device)
    dist.all_reduce(summed)
    # Ranks that share sequences or layers all count the same.
    return dict(zip(totals, summed / built.mesh.layout.sharing, strict=True))


def sums_of(
    built: BuiltModel, batch: Batch, loss: TokenLoss, divisor: Tensor | None = None
) -> Tensor:
    """The sums of `loss` over this rank's share of the tokens of `batch`, float32 [names].

    Losses that are no sum over tokens are in the first of them as often as `divisor` says, by which
    it is divided.
    """
    inputs = built.inputs(batch)
    if built.pipeline is not None:
        return built.pipeline.evaluate(inputs, loss)
    return built.model.loss_sums(built.head, loss, inputs, divisor)


def accumulate_gradients(
    built: BuiltModel, batches: Sequence[Batch], loss: TokenLoss, divisor: Tensor
) -> Tensor:
    """Backward over the micro-batches; returns this rank's sums of `loss`, float64 [names].

    Every micro-batch's summed loss is divided by a count of the whole step over all ranks, and
    gradients are summed over ranks, so that neither accumulation nor the number of ranks weighs
    tokens differently (transformers issue 34191).
    """
    total = torch.zeros(len(loss.names), dtype=torch.float64, device=built.device)
    divisor = divisor.clamp(min=1).float()
    if built.pipeline is not None:
        total += built.pipeline.step([built.inputs(batch) for batch in batches], loss, divisor)
        add_tied_gradients(built.model, built.mesh)
        return total
    for index, batch in enumerate(batches):
        exchange_gradients(built.model, built.config.parallelism, index == len(batches) - 1)
        sums = sums_of(built, batch, loss, divisor)
        (sums[0] / divisor).backward()
        total += sums.detach()
    return total


def evaluate(
    built: BuiltModel, batches: Iterable[Batch], loss: TokenLoss
) -> tuple[dict[str, float], dict[str, float]]:
    """The sums of `loss` over held-out batches, and their counts, of all ranks by name."""
    measured = torch.zeros(len(loss.names), dtype=torch.float64, device=built.device)
    counts: dict[str, float] = {}
    with inference(*(stage.module for stage in built.stages)):
        for batch in batches:
            measured += sums_of(built, batch, loss)
            counts = {name: counts.get(name, 0.0) + count for name, count in batch.counts.items()}
    counted = torch.tensor([*counts.values()], dtype=torch.float64, device=built.device)
    totals = torch.cat([measured, counted / built.mesh.layout.sharing])
    dist.all_reduce(totals)
    sums, counted = totals.tensor_split([len(loss.names)])
    return (
        dict(zip(loss.names, sums.tolist(), strict=True)),
        dict(zip(counts, counted.tolist(), strict=True)),
    )


def document_losses(
    built: BuiltModel, plan: Plan, documents: np.ndarray, loss: TokenLoss, denominator: str
) -> np.ndarray:
    """The loss of these documents of the plan's table over their own count, nan where that is none.

    Each has a row of its own. Float64 [documents], the same on all ranks.
    """
    alone = replace(
        plan, config=plan.config.model_copy(update={"packing": PackingConfig(mode="none")})
    )
    losses = torch.zeros(len(documents), dtype=torch.float64, device=built.device)
    with inference(*(stage.module for stage in built.stages)):
        for first in range(0, len(documents), built.mesh.layout.data_parallel):
            place = first + built.mesh.data_rank
            document, source = plan.table.document(int(documents[min(place, len(documents) - 1)]))
            batch = alone.batch([[Span(document, source, 0, plan.config.training.seq_len)]])
            # Nothing beyond the last, which others have: all must make the same calls.
            losses[place : place + 1] = sums_of(built, batch, loss)[0] / batch.counts[denominator]
    dist.all_reduce(losses)
    return losses.cpu().numpy()
