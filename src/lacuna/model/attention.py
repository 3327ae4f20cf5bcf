"""Attention of our own, which keeps packed documents apart, on whatever kernel can compute it."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.models.gemma2.modeling_gemma2 import (
    eager_attention_forward as soft_capped_attention,
)

from lacuna.model.sinks import sink_attention
from lacuna.parallel.context import gather_sequence, ring_attention
from lacuna.parallel.partial_attention import Part, flash_bounds, visible

PACKED = "lacuna_packed"
HALF = (torch.bfloat16, torch.float16)
# torch 2.11 takes grouped heads without being told; later versions want the argument.
_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    parts: tuple[Part, ...] = (),
    group: ProcessGroup | None = None,
    ring: tuple[Tensor, int] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, for transformers' interface, also of a share of a sequence.

    `query` [B, heads, T, D], `key` [B, key_value_heads, T, D], `value` [B, key_value_heads, T,
    any]; `s_aux` [heads] are sinks; `parts` say which queries see which keys. With context
    parallelism T is this rank's share; the keys of the others come over `group`: by a ring if
    `ring` has the bounds of documents and the longest of them, gathered where a ring cannot be.
    Returns [B, T, heads, width of values].
    """
    assert parts, f"{type(module).__name__} dropped what it was told of the documents"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    bare = sliding_window is None and softcap is None and s_aux is None and not dropout
    if ring is not None and bare:
        width = value.shape[-1]
        output = ring_attention(*_of_one_width(query, key, value), *ring, group, scaling)
        return output[..., :width].transpose(1, 2), None
    if group is not None:
        key, value = gather_sequence(key, 2, group), gather_sequence(value, 2, group)
    flash = query.is_cuda and query.dtype in HALF and not dropout and softcap is None
    outputs = []
    for part, queries in zip(parts, query.chunk(len(parts), 2), strict=True):
        keys, values = key[:, :, : part.stop], value[:, :, : part.stop]
        seen = (queries, keys, values, part, scaling, sliding_window)
        if s_aux is not None:
            outputs.append(_with_sinks(*seen, s_aux))
        elif flash and not (part.whole and sliding_window is None):
            outputs.append(_flash(*seen))
        else:
            outputs.append(_plain(*seen, softcap, dropout, module))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


AttentionInterface.register(PACKED, packed_attention)


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """All with heads as wide as the widest, by zeros behind: kernels know no narrower values (MLA).

    Scores stay as they are, and of the output the first part is that of the values.
    """
    widest = max(query.shape[-1], value.shape[-1])
    return tuple(F.pad(one, (0, widest - one.shape[-1])) for one in (query, key, value))


def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None,
    sinks: Tensor,
) -> Tensor:
    """Attention beside sinks. Returns [B, T, heads, width of values]."""
    tensors = (one.transpose(1, 2) for one in _of_one_width(query, key, value))
    output = sink_attention(*tensors, sinks, part, scaling, window)
    return output[..., : value.shape[-1]]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float, window: int | None
) -> Tensor:
    """torch's `varlen_attn` (FlashAttention); half precision on a GPU only.

    Returns [B, T, heads, width of values].
    """
    tensors = _of_one_width(query, key, value)
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
    grouped = {"enable_gqa": True} if _TAKES_GQA and query.shape[1] != key.shape[1] else {}
    sees = (-1 if window is None else window - 1, 0)
    bounds = flash_bounds(part, query.shape[2])
    output = varlen_attn(*flat, *bounds, scale=scaling, window_size=sees, **grouped)
    return output.unflatten(0, (len(query), query.shape[2]))[..., : value.shape[-1]]


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
    module: nn.Module,
) -> Tensor:
    """torch's own attention, or with a soft cap transformers'. Returns [B, T, heads, D].

    Without a mask where rows are one document each: torch then chooses among all its kernels
    (cuDNN's on new GPUs).
    """
    unmasked = part.whole and window is None and softcap is None
    mask = None if unmasked else visible(part, query.shape[0], query.shape[2], window)[:, None]
    if softcap is not None:
        added = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        return soft_capped_attention(module, query, key, value, added, dropout, scaling, softcap)[0]
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    output = F.scaled_dot_product_attention(query, key, value, mask, dropout, unmasked, **options)
    return output.transpose(1, 2).contiguous()
