"""An attention that is given by two functions: over a part of the keys, and its gradients."""

from typing import Any

import torch
from torch import Tensor

from lacuna.parallel.partial_attention import PARTIAL_ATTENTIONS, Part

_Heads = tuple[Tensor, Tensor, Tensor]


def merged_attention(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None,
) -> Tensor:
    """The output [B, T, heads, width] of the attention that `PARTIAL_ATTENTIONS` has as `kind`.

    Its gradients are computed from the tensors, the output and the logarithm of the denominator:
    nothing of the size of the scores is kept. `torch.compile` takes it as it is.
    """
    sight = (part.cu_q, part.cu_k, part.longest, part.stop, part.causal, part.whole)
    output: Tensor
    output, _ = _forward(query, key, value, *sight, scaling, window, kind)
    return output


@torch.library.custom_op("lacuna::merged_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: int,
    stop: int,
    causal: bool,
    whole: bool,
    scaling: float,
    window: int | None,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of the denominator."""
    attend, _ = PARTIAL_ATTENTIONS[kind]
    part = Part(cu_q, cu_k, longest, stop, causal, whole)
    output, lse = attend(query, key, value, part, scaling, window)
    return output.to(query.dtype).contiguous(), lse.contiguous()


@torch.library.custom_op("lacuna::merged_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: int,
    stop: int,
    causal: bool,
    whole: bool,
    scaling: float,
    window: int | None,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    _, differentiate = PARTIAL_ATTENTIONS[kind]
    part = Part(cu_q, cu_k, longest, stop, causal, whole)
    tensors = (query, key, value)
    grads = differentiate(grad.contiguous(), output, lse, *tensors, part, scaling, window)
    pairs = zip(grads, tensors, strict=True)
    of_query, of_key, of_value = (one.to(like.dtype).contiguous() for one, like in pairs)
    return of_query, of_key, of_value


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    statistics = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:-1], dtype=statistics)
    return query.new_empty(*query.shape[:-1], value.shape[-1]), lse


@_backward.register_fake
def _(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> _Heads:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.settings = inputs[5:]


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, *[None] * 9


_forward.register_autograd(_gradients, setup_context=_save)
