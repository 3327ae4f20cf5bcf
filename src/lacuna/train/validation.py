"""Loss on held-out data."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from lacuna.data import Batch
from lacuna.model.build import BuiltModel
from lacuna.objective.language_modelling import language_modelling_loss
from lacuna.parallel.fsdp import inference


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
