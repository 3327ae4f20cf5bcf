"""Softpick and rectified softmax by Triton kernels, without a matrix of scores in memory.

It is FlashAttention-2's scheme (Dao, arXiv 2307.08691) with other weights. Every query sees an
interval of the keys of its row, and every key is seen by an interval of the queries, whatever
documents and windows there are. Both ends only grow along a row, so that the first and the last
token of a block tell which blocks it needs, and in which of these everything is seen. Statistics
are float32 [B, heads, tokens].
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from lacuna.model.softpick_backward import keys_kernel, queries_kernel
from lacuna.model.softpick_blocks import delta_kernel, interval_kernel
from lacuna.model.softpick_forward import forward_kernel
from lacuna.parallel.partial_attention import Part

# By the width of heads, padded to a power of two: the rows of a block, the rows that it is compared
# with at a time, warps, stages of the pipeline.
Settings = tuple[int, int, int, int]
FORWARD: dict[int, Settings] = {
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (128, 64, 8, 3),
    128: (128, 64, 4, 2),
    256: (128, 64, 8, 2),
}
OF_KEYS: dict[int, Settings] = {  # rows are keys, compared with queries
    16: (128, 64, 8, 2),
    32: (128, 64, 8, 2),
    64: (64, 64, 4, 2),
    128: (64, 64, 4, 2),
    256: (64, 32, 8, 2),
}
OF_QUERIES: dict[int, Settings] = {
    16: (128, 64, 8, 2),
    32: (128, 64, 8, 2),
    64: (64, 64, 4, 2),
    128: (64, 64, 4, 2),
    256: (128, 32, 8, 3),
}
_LOG2_E = math.log2(math.e)
_TOKENS = 256  # of a program that looks for intervals
_DELTAS = 64  # queries of a program that multiplies outputs with their gradients


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None,
    rectified: bool,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The output [B, T, heads, width] and the logarithm of the denominator [B, T, heads].

    `query` is [B, T, heads, D], `key` and `value` are [B, stop, key heads, D or width].
    """
    tensors = tuple(_by_columns(one) for one in (query, key, value))
    rows, queries, heads, _ = query.shape
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    lse = query.new_empty((rows, heads, queries), dtype=torch.float32)
    sight = _intervals(part, rows, queries, window, of_keys=False)
    tuned = FORWARD[_padded(query, value)]
    grid = (triton.cdiv(queries, tuned[0]), rows * heads)
    forward_kernel[grid](
        tensors,
        (output, lse),
        sight,
        *_shape(*tensors),
        scaling * _LOG2_E,
        epsilon,
        RECTIFIED=rectified,
        WHOLE=_is_whole(part, window),
        **_blocks(query, value, tuned[0], tuned[1], tuned),
    )
    return output, lse.transpose(1, 2)


def differentiate(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None,
    rectified: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, given output and denominators over all keys."""
    tensors = tuple(_by_columns(one) for one in (query, key, value))
    grad, output = grad.contiguous(), output.contiguous()
    lse = lse.transpose(1, 2).contiguous()
    rows, queries, heads, _ = query.shape
    width = value.shape[-1]
    delta = torch.empty_like(lse)
    block = (_DELTAS, triton.next_power_of_2(width))
    grid = (triton.cdiv(queries, _DELTAS), rows * heads)
    delta_kernel[grid](output, grad, delta, heads, queries, WIDTH=width, BLOCK=block)
    of_query, of_key, of_value = (
        torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in tensors
    )
    known = (*tensors, grad, lse, delta)
    shape = (*_shape(*tensors), scaling * _LOG2_E, scaling)
    kind = {"RECTIFIED": rectified, "WHOLE": _is_whole(part, window)}
    tuned = OF_KEYS[_padded(query, value)]
    seen_by = _intervals(part, rows, queries, window, of_keys=True)
    grid = (triton.cdiv(key.shape[1], tuned[0]), rows * key.shape[2])
    blocks = _blocks(query, value, tuned[1], tuned[0], tuned)
    keys_kernel[grid](known, (of_key, of_value), seen_by, *shape, **kind, **blocks)
    tuned = OF_QUERIES[_padded(query, value)]
    sees = _intervals(part, rows, queries, window, of_keys=False)
    grid = (triton.cdiv(queries, tuned[0]), rows * heads)
    blocks = _blocks(query, value, tuned[0], tuned[1], tuned)
    queries_kernel[grid](known, (of_query,), sees, *shape, **kind, **blocks)
    return of_query, of_key, of_value


def _by_columns(tensor: Tensor) -> Tensor:
    """The tensor itself if a head's columns are neighbours in memory, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _is_whole(part: Part, window: int | None) -> bool:
    """Whether each row is one causal document, so that nothing need be looked up."""
    return part.whole and part.causal and window is None


def _padded(query: Tensor, value: Tensor) -> int:
    """The wider of both heads' widths, padded to a power of two that a product can have."""
    padded: int = triton.next_power_of_2(max(query.shape[-1], value.shape[-1]))
    return max(padded, 16)


def _shape(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The strides of the three, and the numbers of heads, key heads, queries and keys."""
    strides = tuple(one.stride()[:3] for one in (query, key, value))
    return strides, (query.shape[2], key.shape[2], query.shape[1], key.shape[1])


def _blocks(
    query: Tensor, value: Tensor, queries: int, keys: int, tuned: Settings
) -> dict[str, Any]:
    """The sizes of blocks that are compiled in, of so many `queries` and `keys`."""
    widths = (query.shape[-1], value.shape[-1])
    padded, padded_values = (max(triton.next_power_of_2(width), 16) for width in widths)
    return {
        "WIDTHS": widths,
        "QUERIES": (queries, padded),
        "GRADS": (queries, padded_values),
        "KEYS": (keys, padded),
        "VALUES": (keys, padded_values),
        "num_warps": tuned[2],
        "num_stages": tuned[3],
    }


def _intervals(
    part: Part, rows: int, queries: int, window: int | None, of_keys: bool
) -> tuple[Tensor, Tensor]:
    """The first and the stop of what each token sees, or is seen by: int32 [tokens]."""
    bounds = (part.cu_q, part.cu_k)
    own, others = queries, part.stop
    if of_keys:
        bounds = (part.cu_k, part.cu_q)
        own, others = part.stop, queries
    if _is_whole(part, window):
        return bounds  # which nobody reads
    first = bounds[0].new_empty(rows * own)
    stop = torch.empty_like(first)
    pieces = len(bounds[0]) - 1
    grid = (triton.cdiv(rows * own, _TOKENS),)
    interval_kernel[grid](
        bounds,
        (first, stop),
        (pieces, rows * own, own, others),
        window or 0,
        CAUSAL=part.causal,
        WINDOWED=window is not None,
        KEYS=of_keys,
        STEPS=pieces.bit_length() + 1,
        BLOCK=_TOKENS,
    )
    return first, stop
