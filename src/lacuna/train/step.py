"""Batches through the model: their gradients, or the losses of held-out data and documents."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config import UserError
from lacuna.config.documents import PackingConfig
from lacuna.data import Batch, HeldOut
from lacuna.data.document import Span
from lacuna.data.plan import RowPlan
from lacuna.model.build import BuiltModel
from lacuna.model.forward import loss_sums
from lacuna.model.inputs import to_device
from lacuna.model.loss import Loss, SequenceLoss
from lacuna.objective.find import Objective
from lacuna.parallel.fsdp import inference, set_gradient_exchange
from lacuna.parallel.pipeline import add_tied_gradients

if TYPE_CHECKING:  # an extension
    from lacuna.train.recorded import RecordedSteps


def seed_draws(seed: int) -> None:
    """Seeds whatever a model may draw from; transformers' own way would import peft."""
    random.seed(seed)
    np.random.seed(seed)
    # Not `torch.manual_seed`, which notes the stack for every kind of device that is not used.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def total_counts(built: BuiltModel, batches: Sequence[Batch], **votes: bool) -> dict[str, Tensor]:
    """The counts of a step's batches by name, summed over micro-batches and ranks.

    The `votes` of the ranks are summed with them, and then say how many ranks want something. All
    are float64 scalars on the device.
    """
    counts = {name: sum(batch.counts[name] for batch in batches) for name in batches[0].counts}
    totals = counts | votes
    summed = to_device(torch.tensor([*totals.values()], dtype=torch.float64), built.device)
    dist.all_reduce(summed)
    # Ranks that share sequences or layers all count the same.
    return dict(zip(totals, summed / built.mesh.layout.sharing, strict=True))


def require_counted(objective: Objective, batch: Batch, task: str) -> None:
    """Raises `UserError` where batches do not count what the objective of a task divides by."""
    if objective.denominator not in batch.counts:
        raise UserError(
            f"job.task: {task} divides the loss by {objective.denominator!r}, and its batches "
            f"count {', '.join(batch.counts)}; name one of these as the denominator"
        )


def sums_of(built: BuiltModel, batch: Batch, loss: Loss) -> Tensor:
    """The sums of `loss` over this rank's share of `batch`, float32 [names]."""
    sums = built.read(batch, partial(loss_sums, loss=loss))
    return torch.zeros(len(loss.names), device=built.device) if sums is None else sums


def accumulate_gradients(
    built: BuiltModel,
    batches: Sequence[Batch],
    loss: Loss,
    divisor: Tensor,
    recorded: "RecordedSteps | None" = None,
) -> Tensor:
    """Adds up the gradients of the micro-batches; returns this rank's sums of `loss`, float64.

    Every micro-batch's summed loss is divided by a count of the whole step over all ranks, and
    gradients are summed over ranks, so that neither accumulation nor the number of ranks weighs
    tokens differently (transformers issue 34191). A router's loss is no sum over tokens. It is
    added to the first sum `divisor` times, because the caller divides by that. `recorded` steps
    have the passes made in their own way.
    """
    router = built.head.router
    if router is not None:
        router.begin(built, batches)
    total = torch.zeros(len(loss.names), dtype=torch.float64, device=built.device)
    divisor = divisor.clamp(min=1).float()
    if built.pipeline is not None:
        inputs = [built.inputs(batch) for batch in batches]
        sums = built.pipeline.step(inputs, partial(loss_sums, loss=loss), divisor)
        add_tied_gradients(built.model, built.mesh)
        total += 0 if sums is None else sums
    elif recorded is not None:
        recorded.begin()
        for batch in batches:
            total += recorded.add(batch, divisor)
    else:
        for index, batch in enumerate(batches):
            set_gradient_exchange(built.model, built.parallelism, index == len(batches) - 1)
            sums = sums_of(built, batch, loss)
            if router is not None:
                router.settle()
            (sums[0] / divisor).backward()
            total += sums.detach()
    if router is not None:
        total[0] += router.finish() * divisor
    return total


def evaluate(
    built: BuiltModel, batches: Iterable[Batch], objective: Objective
) -> tuple[dict[str, float], dict[str, float]]:
    """The sums of the objective's held-out loss over batches, and the batches' counts, by name.

    Both are over all ranks.
    """
    loss = objective.held_out_loss
    measured = torch.zeros(len(loss.names), dtype=torch.float64, device=built.device)
    counts: dict[str, float] = {}
    with inference(*(stage.module for stage in built.stages)):
        for batch in batches:
            [annotated] = objective.annotate(built, [batch], loss)
            # Sequences may be compared with what training would find of them, to the last bit.
            with torch.set_grad_enabled(isinstance(loss, SequenceLoss)):
                measured += sums_of(built, annotated, loss).detach()
            counts = {
                name: counts.get(name, 0.0) + count for name, count in annotated.counts.items()
            }
    counted = torch.tensor([*counts.values()], dtype=torch.float64, device=built.device)
    totals = torch.cat([measured, counted / built.mesh.layout.sharing])
    dist.all_reduce(totals)
    sums, counted = totals.tensor_split([len(loss.names)])
    return (
        dict(zip(loss.names, sums.tolist(), strict=True)),
        dict(zip(counts, counted.tolist(), strict=True)),
    )


def document_losses(
    built: BuiltModel, plan: RowPlan, documents: np.ndarray, objective: Objective
) -> np.ndarray:
    """The loss of each of these documents of the plan's table, in a row of its own.

    It is divided by the document's count of what the objective counts; where that is 0 it is nan.
    Returns float64 [documents], the same on all ranks.
    """
    alone = replace(plan, form=replace(plan.form, packing=PackingConfig(mode="none")))
    assert plan.table is not None, "only what is tokenised at the start is ranked"
    losses = torch.zeros(len(documents), dtype=torch.float64, device=built.device)
    with inference(*(stage.module for stage in built.stages)):
        for first in range(0, len(documents), built.mesh.layout.data_parallel):
            place = first + built.mesh.data_rank
            document, source = plan.table.document(int(documents[min(place, len(documents) - 1)]))
            batch = alone.batch([[Span(document, source, 0, plan.form.length)]])
            [batch] = objective.annotate(built, [batch], objective.loss)
            loss = sums_of(built, batch, objective.loss)[0] / batch.counts[objective.denominator]
            # Ranks beyond the last document measure it too, as all must make the same calls: the
            # slice is empty for them.
            losses[place : place + 1] = loss
    dist.all_reduce(losses)
    return losses.cpu().numpy()


def measure_held_out(
    built: BuiltModel, objective: Objective, held_out: HeldOut
) -> tuple[dict[str, float | None], float]:
    """What the log has of held-out data, and the number of it that is better the lower it is."""
    measure = getattr(objective, "measure_held_out", None)
    if measure is not None:
        return cast(tuple[dict[str, float | None], float], measure(built, held_out))
    sums, counts = evaluate(built, held_out(), objective)
    measured = objective.report_held_out(sums, counts)
    loss = measured["val_loss"]
    assert loss is not None, "an objective measures a loss"
    return measured, loss
