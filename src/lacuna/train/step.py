"""Batches through the model: gradients summed over ranks, or the losses of held-out ones or of documents."""

import math
from collections.abc import Iterable
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
from lacuna.model.inputs import to_device
from lacuna.objective.language_modelling import language_modelling_loss
from lacuna.parallel.fsdp import exchange_gradients, inference
from lacuna.parallel.pipeline import add_tied_gradients


def agree(batches: list[Batch], stop: bool, save: bool, built: BuiltModel) -> Tensor:
    """Float64 [tokens, trained tokens, tokens of each source..., stop, save] on the device.

    All are summed over micro-batches and data-parallel ranks.
    """
    counts = zip(*((each.tokens, each.trained_tokens, *each.source_tokens) for each in batches), strict=True)
    totals = to_device(torch.tensor([*map(sum, counts), stop, save], dtype=torch.float64), built.device)
    dist.all_reduce(totals)
    return totals / built.mesh.layout.sharing  # ranks that share sequences or layers all count the same


def accumulate_gradients(built: BuiltModel, batches: list[Batch], trained: Tensor) -> Tensor:
    """Backward over the micro-batches; returns this rank's summed loss.

    Every micro-batch's summed loss is divided by the trained tokens of the whole step over all ranks, and gradients
    are summed over ranks, so that neither accumulation nor the number of ranks weighs tokens differently
    (transformers issue 34191).
    """
    total = torch.zeros((), dtype=torch.float64, device=built.device)
    divisor = trained.clamp(min=1).float()
    if built.pipeline is not None:
        total += built.pipeline.step([built.inputs(batch) for batch in batches], divisor)
        add_tied_gradients(built.model, built.mesh)
        return total
    for index, batch in enumerate(batches):
        exchange_gradients(built.model, built.config, index == len(batches) - 1)
        loss = language_modelling_loss(built, batch, divisor)
        (loss / divisor).backward()
        total += loss.detach()
    return total


def evaluate(built: BuiltModel, batches: Iterable[Batch]) -> dict[str, float | None]:
    """What is reported of held-out data, over all ranks.

    That is the loss in nats per trained token, the share of trained tokens that are the likeliest, and bits per byte
    of text (None where the bytes are unknown; those that the untrained first token of each document stands for are
    taken out in proportion).
    """
    measured = torch.zeros(2, dtype=torch.float64, device=built.device)
    counts = torch.zeros(3, dtype=torch.float64)
    with inference(*(stage.module for stage in built.stages)):
        for batch in batches:
            measured += language_modelling_loss(built, batch)
            counts += torch.tensor([batch.trained_tokens, batch.tokens, batch.text_bytes], dtype=torch.float64)
    totals = torch.cat([measured, counts.to(built.device) / built.mesh.layout.sharing])
    dist.all_reduce(totals)
    nats, right, trained, tokens, text_bytes = totals.tolist()
    mean, accuracy = (nats / trained, right / trained) if trained else (math.nan, math.nan)
    bits_per_byte = mean / math.log(2) * tokens / text_bytes if text_bytes > 0 else None
    return {"val_loss": mean, "val_bits_per_byte": bits_per_byte, "val_token_accuracy": accuracy}


def document_losses(built: BuiltModel, plan: Plan, documents: np.ndarray) -> np.ndarray:
    """The mean loss in nats of the trained tokens of these documents of the plan's table, nan where none is trained.

    Each has a row of its own. Float64 [documents], the same on all ranks.
    """
    alone = replace(plan, config=plan.config.model_copy(update={"packing": PackingConfig(mode="none")}))
    losses = torch.zeros(len(documents), dtype=torch.float64, device=built.device)
    with inference(*(stage.module for stage in built.stages)):
        for first in range(0, len(documents), built.mesh.layout.data_parallel):
            place = first + built.mesh.data_rank
            document, source = plan.table.document(int(documents[min(place, len(documents) - 1)]))
            batch = alone.batch([[Span(document, source, 0, plan.config.training.seq_len)]])
            # Nothing beyond the last, which others have: all must make the same calls.
            losses[place : place + 1] = language_modelling_loss(built, batch)[0] / batch.trained_tokens
    dist.all_reduce(losses)
    return losses.cpu().numpy()
