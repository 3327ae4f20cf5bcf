"""Our own attention: it keeps packed documents apart, by whichever kernel can compute it."""

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

from lacuna.parallel.context import gather_sequence, ring_attention
from lacuna.parallel.partial_attention import Part, flash_bounds, visible

PACKED = "lacuna_packed"
# Of models with kernels of their own, which are told where documents begin, or nothing.
BOUNDS = "lacuna_bounds"
UNTOLD = "lacuna_untold"
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
    """Computes causal attention within documents, for transformers' attention interface.

    `query` is [B, heads, T, D], `key` [B, key heads, T, D], and `value` [B, key heads, T, width].
    `s_aux` [heads] are sinks, and `parts` say which queries see which keys. With context
    parallelism T is this rank's share of the sequence, and the keys of the other ranks come over
    `group`: by a ring where `ring` has the bounds and the longest of the documents, and gathered
    where attention needs more than a ring can do. Returns [B, T, heads, width].
    """
    assert parts, f"{type(module).__name__} dropped what it was told of the documents"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    bare = sliding_window is None and softcap is None and s_aux is None and not dropout
    if ring is not None and group is not None and bare:
        bounds, longest = ring
        width = value.shape[-1]
        query, key, value = of_one_width(query, key, value)
        output = ring_attention(query, key, value, bounds, longest, group, scaling)
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
            outputs.append(_flash_attention(*seen))
        else:
            outputs.append(_plain_attention(*seen, softcap, dropout, module))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


AttentionInterface.register(PACKED, packed_attention)
for name in (BOUNDS, UNTOLD):  # by name only: such models never call it
    AttentionInterface.register(name, packed_attention)


def of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pads the heads of all three with zeros to the width of the widest.

    Kernels take no values that are narrower than the keys, as MLA's are. The scores stay the same,
    and the first part of the output belongs to the values.
    """
    widest = max(query.shape[-1], value.shape[-1])
    of_query = (0, widest - query.shape[-1])
    of_value = (0, widest - value.shape[-1])
    return F.pad(query, of_query), F.pad(key, of_query), F.pad(value, of_value)


def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None,
    sinks: Tensor,
) -> Tensor:
    """Computes attention beside sinks. Returns [B, T, heads, width of values]."""
    from lacuna.model.sinks import sink_attention  # an extension

    width = value.shape[-1]
    query, key, value = (one.transpose(1, 2) for one in of_one_width(query, key, value))
    return sink_attention(query, key, value, sinks, part, scaling, window)[..., :width]


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float, window: int | None
) -> Tensor:
    """Computes attention by torch's `varlen_attn` (FlashAttention).

    It takes half precision on a GPU only. Returns [B, T, heads, width of values].
    """
    rows, heads, tokens, _ = query.shape
    width = value.shape[-1]
    options: dict[str, Any] = {}
    if _TAKES_GQA and heads != key.shape[1]:
        options["enable_gqa"] = True
    query, key, value = (
        one.transpose(1, 2).flatten(0, 1) for one in of_one_width(query, key, value)
    )
    sees = (-1 if window is None else window - 1, 0)
    cu_q, cu_k, longest_q, longest_k = flash_bounds(part, tokens)
    output = varlen_attn(
        query,
        key,
        value,
        cu_q,
        cu_k,
        longest_q,
        longest_k,
        scale=scaling,
        window_size=sees,
        **options,
    )
    assert isinstance(output, Tensor), "nothing beside the output was asked for"
    whole: Tensor = output.unflatten(0, (rows, tokens))
    return whole[..., :width]


def _plain_attention(
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
    """Computes attention by torch's own function, or with a soft cap by transformers'.

    Where every row is one document there is no mask, so that torch can choose among all its kernels
    (cuDNN's on new GPUs). Returns [B, T, heads, D].
    """
    rows, heads, tokens, _ = query.shape
    if softcap is not None:
        seen = visible(part, rows, tokens, window)[:, None]
        added = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, -torch.inf)
        output: Tensor
        output, _ = soft_capped_attention(
            module, query, key, value, added, dropout, scaling, softcap
        )
        return output
    unmasked = part.whole and window is None
    mask = None if unmasked else visible(part, rows, tokens, window)[:, None]
    grouped = heads != key.shape[1]
    output = F.scaled_dot_product_attention(
        query, key, value, mask, dropout, unmasked, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous()
