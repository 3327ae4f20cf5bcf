"""Loss on held-out data."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from lacuna.data import Batch
from lacuna.model.build import BuiltModel
from lacuna.objective.language_modelling import language_modelling_loss
from lacuna.parallel.fsdp import inference
from lacuna.parallel.processes import Process


def evaluate(built: BuiltModel, batches: Iterable[Batch], process: Process) -> tuple[float, float | None]:
    """Loss in nats per trained token, and bits per byte of text (None where the bytes are unknown), over all ranks.

    The bytes that the untrained first token of each document stands for are taken out in proportion.
    """
    loss = torch.zeros((), dtype=torch.float64, device=process.device)
    counts = torch.zeros(3, dtype=torch.float64)
    with inference(*(stage.module for stage in built.stages)):
        for batch in batches:
            loss += language_modelling_loss(built, batch)
            counts += torch.tensor([batch.trained_tokens, batch.tokens, batch.text_bytes], dtype=torch.float64)
    totals = torch.cat([loss[None], counts.to(process.device) / built.mesh.layout.sharing])
    dist.all_reduce(totals)
    nats, trained, tokens, text_bytes = totals.tolist()
    mean = nats / trained if trained else math.nan
    bits_per_byte = mean / math.log(2) * tokens / text_bytes if text_bytes > 0 else None
    return mean, bits_per_byte
