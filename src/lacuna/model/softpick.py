"""Rectified attentions: softpick, and softmax over the keys of scores that are not negative.

Softpick (Zuhri et al., arXiv 2504.20966) weighs a key of score x with max(e^x - 1, 0), over the sum
of |e^x - 1| of all keys that are seen. A row's weights need not sum to 1, and are all 0 where no
score is positive. Its numerators and denominators are sums over keys, so that results over parts of
the keys are merged as softmax's are, by the logarithms of their denominators.
"""

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from lacuna.model.attention import HALF
from lacuna.model.own_attention import of_parts
from lacuna.parallel.partial_attention import PARTIAL_ATTENTIONS, Part, visible

# Added to softpick's denominator over e to the largest score (but at least 0), as in the paper's
# kernel: else a row whose scores are all 0 would be 0 / 0.
EPSILON = 1e-6
# So many queries at a time have the scores of their keys in memory.
_QUERIES = 512
_WIDEST = 256  # heads that the kernels take

_Heads = tuple[Tensor, Tensor, Tensor]


def _takes_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether the Triton kernels compute this: half precision on a GPU, heads of up to 256.

    TRITON_INTERPRET=1 has them interpreted on a CPU, where bfloat16 is not computed right.
    """
    widest = max(query.shape[-1], value.shape[-1])
    if widest > _WIDEST or find_spec("triton") is None:
        return False
    if query.is_cuda:
        return query.dtype in HALF
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return interpreted and query.dtype in (torch.float16, torch.float32)


def _compute(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The output [B, T, heads, width] and the logarithm of the denominator [B, T, heads].

    Shapes and sight are those of `attend`. It is computed in float32, unless tensors are float64.
    For a query that sees no key, or for rectified softmax no score that is not negative, results
    are 0 and -inf.
    """
    if _takes_kernel(query, value):
        from lacuna.model.softpick_kernels import attend  # imports triton

        rectified = kind == "rectified"
        return attend(query, key, value, part, scaling, window, rectified, EPSILON)
    seen = visible(part, query.shape[0], query.shape[1], window)
    query, key, value = _by_key_head(key.shape[2], query, key, value)
    pieces = []
    for queries, sees in zip(query.split(_QUERIES, 3), seen.split(_QUERIES, 1), strict=True):
        scores = queries @ key.mT * scaling
        sees = sees[:, None, None]
        if kind == "softpick":
            weights, lse = _softpick(scores, sees)
        else:
            kept = scores.masked_fill(~(sees & (scores >= 0)), -torch.inf)
            lse = kept.logsumexp(-1)
            weights = (kept - _finite(lse)).exp()
        pieces.append((weights @ value, lse))
    outputs, denominators = zip(*pieces, strict=True)
    return _by_head(torch.cat(outputs, 3)), _by_head(torch.cat(denominators, 3))


def _softpick(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Softpick's weights, and the logarithm of the denominator: -inf where no key is seen.

    All terms are divided by e^m, where m is the largest score, or 0 if that is larger: e^-m would
    overflow for scores below -88.
    """
    highest = scores.masked_fill(~seen, 0).amax(-1, keepdim=True).clamp(min=0)
    terms = ((scores - highest).exp() - (-highest).exp()).masked_fill(~seen, 0)
    denominator = terms.abs().sum(-1, keepdim=True) + EPSILON
    lse = (highest + denominator.log()).masked_fill(~seen.any(-1, keepdim=True), -torch.inf)
    return terms.clamp(min=0) / denominator, lse.squeeze(-1)


def _differentiate(
    kind: str,
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None = None,
) -> _Heads:
    """Gradients of query, key and value.

    With D the denominator, w the weights, g their gradient and o the output, the gradient of a
    score x is e^x / D · ([x > 0] · g - sign(x) · Σ g·w), where Σ g·w = Σ do·o.
    """
    if _takes_kernel(query, value):
        from lacuna.model.softpick_kernels import differentiate

        known = (grad, output, lse, query, key, value)
        return differentiate(*known, part, scaling, window, kind == "rectified")
    seen = visible(part, query.shape[0], query.shape[1], window)
    tensors = _by_key_head(key.shape[2], grad, output, lse, query, key, value)
    grad, output, lse, query, key, value = tensors
    given = (grad * output).sum(-1, keepdim=True)
    of_key = torch.zeros_like(key)
    of_value = torch.zeros_like(value)
    of_query = []
    split = (tensor.split(_QUERIES, 3) for tensor in (grad, given, lse, query))
    for grads, shares, lses, queries, sees in zip(*split, seen.split(_QUERIES, 1), strict=True):
        scores = queries @ key.mT * scaling
        positive = scores > 0
        sees = sees[:, None, None]
        if kind == "rectified":
            sees = sees & (scores >= 0)
        # Where a query sees no key, or has no positive score of softmax, nothing is left of it.
        shares_of_keys = (scores - _finite(lses)).masked_fill(~sees, -torch.inf).exp()
        of_weights = grads @ value.mT
        if kind == "softpick":
            weights = (shares_of_keys - (-_finite(lses)).exp()).clamp(min=0)
            sign = torch.where(positive, 1.0, -1.0)
            of_scores = shares_of_keys * (of_weights * positive - sign * shares)
        else:
            weights = shares_of_keys
            of_scores = shares_of_keys * (of_weights - shares)
        of_query.append(of_scores @ key * scaling)
        of_key += (of_scores.mT @ queries * scaling).sum(2, keepdim=True)
        of_value += (weights.mT @ grads).sum(2, keepdim=True)
    return _by_head(torch.cat(of_query, 3)), _by_head(of_key), _by_head(of_value)


def _finite(lse: Tensor) -> Tensor:
    """The logarithms of denominators [..., 1], 0 where there is no key."""
    return lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)


def _by_key_head(key_heads: int, *tensors: Tensor) -> list[Tensor]:
    """Turns [B, tokens, heads, ...] into [B, key heads, queries of each, tokens, ...].

    They become float32, unless they are float64.
    """
    wide = (tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors)
    return [tensor.unflatten(2, (key_heads, -1)).movedim(1, 3) for tensor in wide]


def _by_head(tensor: Tensor) -> Tensor:
    return tensor.movedim(3, 1).flatten(2, 3)


SOFTPICK = of_parts("softpick", partial(_compute, "softpick"), partial(_differentiate, "softpick"))
RECTIFIED = of_parts(
    "rectified", partial(_compute, "rectified"), partial(_differentiate, "rectified")
)
SCALED_SOFTPICK = replace(SOFTPICK, scaled=True)
SCALED_SOFTMAX = replace(of_parts("softmax", *PARTIAL_ATTENTIONS["softmax"]), scaled=True)
