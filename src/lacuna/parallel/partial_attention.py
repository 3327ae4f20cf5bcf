"""Attention over a part of the keys, and the log-sum-exp by which parts are merged."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_FLASH = torch.ops.aten._flash_attention_forward
_FLASH_BACKWARD = torch.ops.aten._flash_attention_backward


class Part(NamedTuple):
    """Queries and keys in N pieces, where a query sees only keys of its own piece.

    A piece may have no queries or no keys.

    Attributes:
        cu_q: int32 [N + 1], bounds of the pieces among the queries of all rows, flattened.
        cu_k: int32 [N + 1], bounds of the pieces among the first `stop` keys of each row,
            flattened.
        longest: no piece has more queries than this, nor more keys.
        stop: the number of keys of each row.
        causal: if true, the last query of a piece sees all of its keys, the one before all but the
            last, and so on (FlashAttention's bottom-right alignment); else every query sees all.
        whole: whether every row is known to be one piece, which has, if causal, as many queries as
            keys.
    """

    cu_q: Tensor
    cu_k: Tensor
    longest: int
    stop: int
    causal: bool = True
    whole: bool = False


def flash_bounds(part: Part, queries: int) -> tuple[Tensor, Tensor, int, int]:
    """The bounds and longest lengths that FlashAttention takes, for so many `queries` in a row."""
    # Told that no piece has more than 1 query, it would take each to have one, as in generation.
    return part.cu_q, part.cu_k, max(min(part.longest, queries), 2), min(part.longest, part.stop)


def visible(part: Part, rows: int, queries: int, window: int | None = None) -> Tensor:
    """The keys that each of a row's `queries` sees: bool [rows, queries, stop].

    With a `window` a query sees only itself and the window − 1 keys before it.
    """

    def places(bounds: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The piece of each token, and the number of tokens from it to the end of the piece."""
        tokens = torch.arange(rows * length, dtype=torch.int32, device=bounds.device)
        # All bounds are searched, since torch 2.11 does not compile a slice here.
        piece = torch.searchsorted(bounds, tokens, right=True)
        return piece.view(rows, -1), (bounds[piece] - tokens).view(rows, -1)

    piece_q, left_q = places(part.cu_q, queries)
    piece_k, left_k = places(part.cu_k, part.stop)
    seen = piece_q[:, :, None] == piece_k[:, None]
    distance = left_k[:, None] - left_q[:, :, None]
    if part.causal:
        seen = seen & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The output [B, T, heads, D] and float32 log-sum-exp [B, T, heads] over the keys of a part.

    `query` is [B, T, heads, D], `key` and `value` are [B, stop, key heads, D]. For a query that
    sees no key they are 0 and -inf. With a `window` a query sees only itself and the window - 1
    keys before it.
    """
    if window is None and _takes_cudnn(query, key, value, part):
        tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output, lse, *_ = _CUDNN(*tensors, None, True, 0.0, part.causal, scale=scaling)
        return output.transpose(1, 2), lse.view(lse.shape[:3]).transpose(1, 2)
    if _takes_flash(query):
        tensors = (tensor.flatten(0, 1) for tensor in (query, key, value))
        causal, sees = _flash_sight(part, window)
        settings = (*flash_bounds(part, query.shape[1]), 0.0, causal, False)
        output, lse, *_ = _FLASH(*tensors, *settings, scale=scaling, **sees)
        lse = lse.masked_fill(
            lse == torch.inf, -torch.inf
        )  # of queries that see no key it says inf
        return output.unflatten(0, query.shape[:2]), lse.T.unflatten(0, query.shape[:2])
    query, key, value = _group_heads(key.shape[2], query, key, value)
    scores = _masked_scores(query, key, part, scaling, window)
    lse = scores.logsumexp(-1)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # weights are zero where all scores are -inf
    weights = (scores - finite[..., None]).exp()
    return _ungroup_heads(weights @ value), _ungroup_heads(lse)


def attend_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None = None,
) -> tuple[Tensor, ...]:
    """The contribution of a part to the gradients of query, key and value.

    The output and the log-sum-exp are those over all keys, of which the part may have only some.
    """
    if window is None and _takes_cudnn(query, key, value, part):
        tensors = (tensor.transpose(1, 2) for tensor in (grad, query, key, value, output))
        none = torch.empty((), dtype=torch.int64, device=query.device)  # there is no dropout
        saved = (lse.transpose(1, 2).unsqueeze(-1).contiguous(), none, none, None, None, None)
        lengths = (query.shape[1], key.shape[1])
        grads = _CUDNN_BACKWARD(*tensors, *saved, *lengths, 0.0, part.causal, scale=scaling)
        return tuple(tensor.transpose(1, 2) for tensor in grads)
    if _takes_flash(query):
        tensors = (tensor.flatten(0, 1) for tensor in (grad, query, key, value, output))
        no_dropout = (torch.empty(2, dtype=torch.uint64, device=query.device), query.new_empty(0))
        causal, sees = _flash_sight(part, window)
        bounds = flash_bounds(part, query.shape[1])
        settings = (lse.flatten(0, 1).T.contiguous(), *bounds, 0.0, causal, *no_dropout)
        grads = _FLASH_BACKWARD(*tensors, *settings, scale=scaling, **sees)
        return tuple(tensor.unflatten(0, (len(query), -1)) for tensor in grads)
    key_heads = key.shape[2]
    grad, output, lse, query, key, value = _group_heads(
        key_heads, grad, output, lse, query, key, value
    )
    weights = (_masked_scores(query, key, part, scaling, window) - lse[..., None]).exp()
    of_weights = grad @ value.mT - (grad * output).sum(-1, keepdim=True)
    of_scores = weights * of_weights * scaling
    of_key = (of_scores.mT @ query).sum(2, keepdim=True)
    of_value = (weights.mT @ grad).sum(2, keepdim=True)
    return _ungroup_heads(of_scores @ key), _ungroup_heads(of_key), _ungroup_heads(of_value)


def _takes_cudnn(query: Tensor, key: Tensor, value: Tensor, part: Part) -> bool:
    """Whether cuDNN's kernel, the fastest on the newest GPUs, can compute a part.

    It knows no pieces.
    """
    if not (query.is_cuda and part.whole):
        return False  # the question below fails where torch was built for GPUs and there is none
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return can_use_cudnn_attention(SDPAParams(query, key, value, None, 0.0, part.causal, True))


def _takes_flash(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def _flash_sight(part: Part, window: int | None) -> tuple[bool, dict[str, int]]:
    """Whether FlashAttention is to be causal, and its window; a window is causal by itself."""
    if window is None:
        return part.causal, {}
    return False, {"window_size_left": window - 1, "window_size_right": 0}


def _group_heads(key_heads: int, *tensors: Tensor) -> list[Tensor]:
    """Turns each [B, tokens, heads, ...] into float32 [B, key heads, queries of each, tokens, ...].

    The queries of a key head are then side by side.
    """
    return [tensor.float().unflatten(2, (key_heads, -1)).movedim(1, 3) for tensor in tensors]


def _ungroup_heads(tensor: Tensor) -> Tensor:
    return tensor.movedim(3, 1).flatten(2, 3)


def _masked_scores(
    query: Tensor, key: Tensor, part: Part, scaling: float, window: int | None
) -> Tensor:
    """The scores of grouped queries and keys: -inf where a query does not see a key."""
    seen = visible(part, len(query), query.shape[3], window)[:, None, None]
    return (query @ key.mT * scaling).masked_fill(~seen, -torch.inf)


SOFTMAX = "softmax"
# The forward and the backward computation, as above, of each kind of attention whose partial
# results are merged by a log-sum-exp.
PARTIAL_ATTENTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    SOFTMAX: (attend, attend_backward)
}
