"""Softmax attention in fla's models where the package flash-attn is missing: ours in its place."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from lacuna.model.attention import packed_attention
from lacuna.parallel.partial_attention import Part

# fla's modules that compute softmax attention by the package flash-attn.
_MODULES = ("attn", "bitattn", "mla", "moba", "rodimus")


def use_our_softmax_attention() -> None:
    """Has fla's layers of softmax attention use ours where the package flash-attn is missing."""
    for name in _MODULES:
        module: Any = sys.modules.get(f"fla.layers.{name}")
        if module is not None and getattr(module, "flash_attn_func", None) is None:
            module.flash_attn_func = _attention_of_rows
            module.flash_attn_varlen_func = _attention_of_documents


def _attention_of_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Softmax attention of whole rows [B, T, heads, D], as flash-attn's function of that name.

    There may be more keys than queries: the last query sees all keys.
    """
    rows, queries = query.shape[:2]
    keys = key.shape[1]
    starts = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    part = Part(starts * queries, starts * keys, max(queries, keys), keys, whole=queries == keys)
    return _attend(query, key, value, part, causal, window_size)


def _attention_of_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Softmax attention of documents [tokens, heads, D] one behind the other, as flash-attn's."""
    longest = min(max(max_seqlen_q, max_seqlen_k), key.shape[0])
    part = Part(cu_seqlens_q.int(), cu_seqlens_k.int(), longest, key.shape[0])
    return _attend(query[None], key[None], value[None], part, causal, window_size)[0]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    if not causal:
        raise NotImplementedError("attention to later tokens needs the package flash-attn")
    window = None if window_size[0] < 0 else window_size[0] + 1
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    owner = nn.Identity()  # asked for nothing but its name
    output, _ = packed_attention(
        owner, query, key, value, None, sliding_window=window, parts=(part,)
    )
    return output
