"""A micro-batch as one rank's model takes it: on the device, its share of every sequence, told of the documents."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lacuna.data import Batch
from lacuna.model.attention import PACKED
from lacuna.parallel.context import Part, causal_parts, shard_sequence
from lacuna.parallel.mesh import Mesh

# Bounds grow in steps of this many documents, so that compiled layers meet few different lengths.
DOCUMENT_STEP = 64


@dataclass(frozen=True)
class Inputs:
    """What the forward pass of one micro-batch needs.

    Attributes:
        input_ids: int64 [B, T], this rank's share of the sequences.
        labels: int64 [B, T], the same share.
        position_ids: int64 [B, T·tp]: layers see the share of all tensor-parallel ranks.
        attention: what attention must be told beside the position ids.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attention: dict[str, Any]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies without waiting, through page-locked memory on a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pad_bounds(bounds: Tensor) -> Tensor:
    """`bounds` [..., n + 1] with empty documents appended up to the next multiple of `DOCUMENT_STEP` documents."""
    missing = -(bounds.shape[-1] - 1) % DOCUMENT_STEP
    return torch.cat([bounds, bounds[..., -1:].expand(*bounds.shape[:-1], missing)], dim=-1)


def longest_bound(max_seqlen: int, row_length: int) -> int:
    """An upper bound on the longest document that takes few different values: a power of two, at most the row."""
    return min(1 << (max_seqlen - 1).bit_length(), row_length)


def document_ends(cu_seqlens: Tensor, rows: int, length: int) -> Tensor:
    """The ends of the documents within each row, int32 [rows, n], the last of each row repeated."""
    ends = [cu_seqlens[(cu_seqlens > row * length) & (cu_seqlens <= (row + 1) * length)] - row * length
            for row in range(rows)]  # fmt: skip
    most = max(len(row) for row in ends)
    return torch.stack([F.pad(row, (0, most - len(row)), value=length) for row in ends])


def _whole_rows(cu_seqlens: Tensor, length: int) -> bool:
    """Whether every row of `length` tokens is one document."""
    return int(cu_seqlens[-1]) == length * (len(cu_seqlens) - 1)


def packing_arguments(
    attention: str, cu_seqlens: Tensor, max_seqlen: int, length: int, device: torch.device
) -> dict[str, Any]:
    """What `attention` must be told of the documents in rows of `length` tokens, beside their position ids."""
    if attention == PACKED:
        bounds, longest = to_device(pad_bounds(cu_seqlens), device), longest_bound(max_seqlen, length)
        whole = _whole_rows(cu_seqlens, length)
        return {"parts": (Part(bounds, bounds, longest, longest, length, whole=whole),)}
    if attention.startswith("flash_attention"):
        bounds = to_device(cu_seqlens, device)
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
                "max_length_q": max_seqlen, "max_length_k": max_seqlen}  # fmt: skip
    return {}  # transformers builds the mask from position ids that start again


def _shared_arguments(batch: Batch, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """What our attention must be told where ranks share each sequence."""
    rows, length = batch.input_ids.shape
    longest = longest_bound(batch.max_seqlen, length)
    ends = document_ends(batch.cu_seqlens, rows, length)
    if not _whole_rows(batch.cu_seqlens, length):
        ends = pad_bounds(F.pad(ends, (1, 0)))[:, 1:]
    ends = to_device(ends, device)
    parts = causal_parts(ends, length, mesh.layout.cp, mesh.rank("cp"), longest)
    ring = (ends, longest) if mesh.layout.ring else None
    return {"group": mesh.named["cp"].get_group(), "parts": parts, "ring": ring}


def prepare_inputs(batch: Batch, attention: str, device: torch.device, mesh: Mesh, whole_labels: bool) -> Inputs:
    """This rank's share of `batch`, on the device; with `whole_labels` those of all its tensor-parallel ranks."""
    tensors = (batch.input_ids, batch.labels, batch.position_ids)
    if attention.startswith("flash_attention"):  # transformers' own wants one row
        tensors = tuple(tensor.reshape(1, -1) for tensor in tensors)
    if mesh.layout.cp > 1:
        tensors = tuple(shard_sequence(tensor, 1, mesh.layout.cp, mesh.rank("cp")) for tensor in tensors)
    input_ids, labels, position_ids = (to_device(tensor, device) for tensor in tensors)
    input_ids, own_labels = (tensor.chunk(mesh.layout.tp, dim=1)[mesh.rank("tp")] for tensor in (input_ids, labels))
    if mesh.layout.cp > 1:
        told = _shared_arguments(batch, mesh, device)
    else:
        told = packing_arguments(attention, batch.cu_seqlens, batch.max_seqlen, batch.input_ids.shape[1], device)
    return Inputs(input_ids, labels if whole_labels else own_labels, position_ids, told)
