"""Losses of tokens and of sequences, made from hidden states chunk by chunk.

A matrix of (tokens × vocabulary) never exists.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lacuna.data.packing import IGNORED
from lacuna.model.chunks import Parts, chunk_size, chunks_of
from lacuna.model.head import Head

Columns = Mapping[str, Tensor]
Sums = dict[str, Tensor]


@dataclass(frozen=True)
class TokenLoss:
    """A loss that is a sum over tokens, where each token's loss depends on its own logits.

    Attributes:
        of: takes logits [tokens, vocabulary], float32, and columns [tokens, ...], and returns sums
            over the tokens by name, float32 scalars. Tokens that are not trained must add nothing
            to any of them: they may be left out.
        names: the names of the sums. The first, `loss`, is minimised; the others have no gradient
            and are reported.
    """

    of: Callable[[Tensor, Columns], Sums]
    names: tuple[str, ...] = ("loss",)


@dataclass(frozen=True)
class SequenceLoss:
    """A loss that is a sum over sequences, made from each one's summed log-probability.

    Attributes:
        of: takes the log-probability of each sequence [sequences], float32, which is summed over
            its labels, and columns [sequences], and returns sums over the sequences by name,
            float32 scalars. Among the columns is `tokens`, the number of labels of each sequence;
            where batches have a column of `prompt_labels`, also `prompt_logprobs` and
            `prompt_tokens`.
        names: the names of the sums, as in `TokenLoss`.
        of_scores: whether `of` takes scores instead, of a model that scores, each at the token
            where the column `scored` has the number of the sequence, counted from 1.
    """

    of: Callable[[Tensor, Columns], Sums]
    names: tuple[str, ...] = ("loss",)
    of_scores: bool = False


Loss = TokenLoss | SequenceLoss


def stacked(sums: Sums, names: tuple[str, ...]) -> Tensor:
    """The sums in the order of their names, float32 [names]."""
    return torch.stack([sums[name].float() for name in names])


def chunked_sums(
    linear: nn.Linear,
    head: Head,
    loss: TokenLoss,
    hidden: Tensor,
    columns: Columns,
    places: Tensor | None = None,
    chunk: int = 0,
) -> Tensor:
    """The sums of `loss`, float32 [names], over all tokens, or those at `places`, int64 [places].

    Their logits are `head.logits(linear(hidden))`, where `hidden` is [tokens, width], the weight
    [vocabulary, width], and `columns` are [tokens, ...]. Only the first sum, which is minimised,
    has a gradient. Logits exist for `chunk` tokens at a time (0: as many as fit `CHUNK_BYTES`), and
    the weight's gradient is accumulated over the chunks in float32. `head.compiled` fuses the
    elementwise work on a GPU. Gradients are computed in the forward pass, as in Liger (arXiv
    2410.10989).
    """
    weight: Tensor = linear.weight  # which may be cast when it is read
    is_score = len(weight) == 1
    if is_score:  # near ones would be the same in bfloat16
        weight = weight.float()
    bias = None if linear.bias is None else linear.bias.to(weight.dtype)
    hidden = hidden.to(weight.dtype)  # some models keep their head in float32
    # A score costs less than picking out the states that it is made of.
    parts = chunks_of(len(hidden), chunk or chunk_size(weight), None if is_score else places)
    if torch.is_grad_enabled():
        sums: Tensor = _ChunkedTokenLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, columns, head, loss, parts
        )
        return sums
    total = torch.zeros(len(loss.names), dtype=torch.float32, device=hidden.device)
    for part in parts:
        logits = head.logits(F.linear(hidden[part], weight, bias))
        total += stacked(loss.of(logits, _of_chunk(columns, part)), loss.names)
    return total


def chunked_logprobs(
    linear: nn.Linear,
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    places: Tensor | None = None,
    chunk: int = 0,
) -> Tensor:
    """The log-probability of each label [tokens] by the logits `head.logits(linear(hidden))`.

    It is float32 [tokens], and 0 where the label is `IGNORED`, or not at one of the `places`, int64
    [places], if these are given. Logits exist for `chunk` tokens at a time, in the forward pass and
    once more in the backward pass.
    """
    weight = linear.weight  # which may be cast when it is read
    hidden = hidden.to(weight.dtype)
    parts = chunks_of(len(hidden), chunk or chunk_size(weight), places)
    logprobs: Tensor = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, linear.bias, labels, head, parts
    )
    return logprobs


def logprobs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each label [tokens] by its logits, 0 where it is `IGNORED`."""
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


def _weighted_logprobs(logits: Tensor, columns: Columns) -> Sums:
    return {"loss": (logprobs_of(logits, columns["labels"]) * columns["weight"]).sum()}


def _of_chunk(columns: Columns, part: slice | Tensor) -> Columns:
    return {name: column[part] for name, column in columns.items()}


def _gradient_and_sums(
    product: Tensor, columns: Columns, head: Head, loss: TokenLoss
) -> tuple[Tensor, Tensor]:
    """The gradient of a chunk's loss with respect to the head's product, and the sums."""

    def with_sums(product: Tensor) -> tuple[Tensor, Tensor]:
        sums = stacked(loss.of(head.logits(product), columns), loss.names)
        return sums[0], sums

    gradient, (_, sums) = torch.func.grad_and_value(with_sums, has_aux=True)(product)
    return gradient, sums


def _gradient_in_place(product: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The same, with the gradient in the place of the product: for code that keeps no logits."""
    gradient, sums = _gradient_and_sums(product, *given)
    return product.copy_(gradient), sums


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient times a scalar, rounded once to `dtype`."""
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, compiled when it is first asked for, because this imports torch's compiler."""
    return torch.compile(function, fullgraph=True)


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to the float32 `total`, in place, without rounding the product first."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _gradients_by_chunk(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    needed: tuple[bool, ...],
    columns: Columns,
    head: Head,
    loss: TokenLoss,
    parts: Parts,
) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None]]:
    """The sums of `loss`, and the gradients of the first sum with respect to `tensors`.

    The tensors are the hidden states, the head's weight and its bias. The gradients of the last two
    are float32, and None where they are not `needed`. That of states in none of the `parts` is 0.
    """
    hidden, weight, bias = tensors
    is_compiled = head.compiled and hidden.is_cuda
    step = _compiled(_gradient_in_place) if is_compiled else _gradient_and_sums
    total = torch.zeros(len(loss.names), dtype=torch.float32, device=hidden.device)
    # Without a part there is no token to be trained.
    is_whole = bool(parts) and isinstance(parts[0], slice)
    hidden_gradient = torch.empty_like(hidden) if is_whole else torch.zeros_like(hidden)
    weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
    bias_gradient = None
    if bias is not None and needed[2]:
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32)
    for part in parts:
        states = hidden[part]
        gradient, sums = step(F.linear(states, weight, bias), _of_chunk(columns, part), head, loss)
        total += sums
        if is_whole:
            torch.mm(gradient, weight, out=hidden_gradient[part])
        else:
            hidden_gradient[part] = gradient @ weight
        if weight_gradient is not None:
            _accumulate_product(weight_gradient, gradient.t(), states)
        if bias_gradient is not None:
            bias_gradient += gradient.sum(0, dtype=torch.float32)
        del gradient  # of which the next chunk makes another
    return total, (hidden_gradient, weight_gradient, bias_gradient)


class _ChunkedTokenLoss(torch.autograd.Function):
    """Computes the gradients along with the loss.

    That is one matrix product fewer than recomputing logits, and no logits are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: Columns,
        head: Head,
        loss: TokenLoss,
        parts: Parts,
    ) -> Tensor:
        total, gradients = _gradients_by_chunk(
            (hidden, weight, bias), ctx.needs_input_grad, columns, head, loss, parts
        )
        ctx.save_for_backward(*gradients)
        ctx.dtype = weight.dtype
        ctx.scaled = _compiled(_scaled) if head.compiled and hidden.is_cuda else _scaled
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in float32 and rounded once; not in place: zero-bubble pipelines come here twice.
        scaled = (
            None if gradient is None else ctx.scaled(gradient, upstream[0], ctx.dtype)
            for gradient in ctx.saved_tensors
        )
        return (*scaled, None, None, None, None)


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probabilities of labels, whose gradients are known only when the sequences' loss is."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: Head,
        parts: Parts,
    ) -> Tensor:
        found = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        for part in parts:
            logits = head.logits(F.linear(hidden[part], weight, bias))
            found[part] = logprobs_of(logits, labels[part])
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.head = head
        ctx.parts = parts
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, labels = ctx.saved_tensors
        columns = {"labels": labels, "weight": upstream}
        loss = TokenLoss(_weighted_logprobs)
        _, gradients = _gradients_by_chunk(
            tensors, ctx.needs_input_grad, columns, ctx.head, loss, ctx.parts
        )
        rounded = (None if one is None else one.to(tensors[1].dtype) for one in gradients)
        return (*rounded, None, None, None)
