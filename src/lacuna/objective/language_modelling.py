"""Next-token prediction: the summed cross-entropy of one micro-batch."""

import torch
from torch import Tensor

from lacuna.data import Batch
from lacuna.model.attention import VARLEN
from lacuna.model.build import BuiltModel
from lacuna.model.head import packing_arguments

# cu_seqlens grows in steps of this many documents, so that compiled layers meet few different lengths.
DOCUMENT_STEP = 64


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies without waiting, through page-locked memory on a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pad_bounds(cu_seqlens: Tensor) -> Tensor:
    """`cu_seqlens` with empty documents appended up to the next multiple of `DOCUMENT_STEP` documents."""
    documents = len(cu_seqlens) - 1
    missing = -documents % DOCUMENT_STEP
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)])


def longest_bound(max_seqlen: int, row_length: int) -> int:
    """An upper bound on the longest document that takes few different values: a power of two, at most the row."""
    return min(1 << (max_seqlen - 1).bit_length(), row_length)


def language_modelling_loss(built: BuiltModel, batch: Batch, device: torch.device) -> Tensor:
    """Summed loss (nats, float32 scalar) over the trained tokens of `batch`."""
    input_ids, position_ids, labels = batch.input_ids, batch.position_ids, batch.labels
    if built.attention.startswith("flash_attention"):  # transformers' own wants one row
        input_ids, position_ids, labels = (tensor.reshape(1, -1) for tensor in (input_ids, position_ids, labels))
    bounds, longest = batch.cu_seqlens, batch.max_seqlen
    if built.attention == VARLEN:
        bounds, longest = pad_bounds(bounds), longest_bound(longest, input_ids.shape[1])
    extra = packing_arguments(built.attention, to_device(bounds, device), longest)
    return built.model.summed_loss(
        built.head, to_device(input_ids, device), to_device(position_ids, device), to_device(labels, device), extra
    )
