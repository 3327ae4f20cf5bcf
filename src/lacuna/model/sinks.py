"""Attention with sinks: a logit of each head that takes weight and gives no value (GPT-OSS)."""

from typing import Any

import torch
from torch import Tensor

from lacuna.parallel.partial_attention import Part, attend, attend_backward


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    part: Part,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Computes the attention of a part beside sinks: [B, T, heads, D].

    `query` is [B, T, heads, D], `key` and `value` are [B, stop, key heads, D], and `sinks` [heads].
    The part has every key that its queries may see. A sink is one more key of the softmax, whose
    value is 0, so that the result is attention without it times the weight that it leaves over.
    """
    output: Tensor
    output, _ = _forward(
        query,
        key,
        value,
        sinks,
        part.cu_q,
        part.cu_k,
        part.longest,
        part.stop,
        scaling,
        window,
    )
    return output


@torch.library.custom_op("lacuna::sink_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: int,
    stop: int,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp over keys and sink."""
    part = Part(cu_q, cu_k, longest, stop)
    output, lse = attend(query, key, value, part, scaling, window)
    total = torch.logaddexp(lse, sinks.float())
    output = output * (lse - total).exp().unsqueeze(-1)
    return output.to(query.dtype).contiguous(), total.contiguous()


@torch.library.custom_op("lacuna::sink_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    output: Tensor,
    total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: int,
    stop: int,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and sinks.

    Given the log-sum-exp over all keys and the sink, the gradients of the keys are computed as
    without a sink. The sink's value is 0, so that it only takes weight away from the others.
    """
    part = Part(cu_q, cu_k, longest, stop)
    of_query, of_key, of_value = attend_backward(
        grad.contiguous(), output, total, query, key, value, part, scaling, window
    )
    given = (grad.float() * output.float()).sum(-1)
    weight = (sinks.float() - total).exp()
    of_sinks = -(weight * given).sum((0, 1))
    return (
        of_query.to(query.dtype).contiguous(),
        of_key.to(query.dtype).contiguous(),
        of_value.to(query.dtype).contiguous(),
        of_sinks.to(sinks.dtype),
    )


@_forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    total = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return query.new_empty(query.shape), total


@_backward.register_fake
def _(
    grad: Tensor,
    output: Tensor,
    total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in (query, key, value, sinks))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.settings = inputs[6:]


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, *[None] * 6


_forward.register_autograd(_differentiate, setup_context=_save)
