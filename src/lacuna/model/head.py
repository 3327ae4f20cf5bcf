"""From a micro-batch to its loss, for any Hugging Face causal LM: how its head makes logits is found out by asking it.

A loss of tokens sees the logits of a chunk of them at a time: the (tokens × vocabulary) matrix
never exists.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from lacuna.config import logger
from lacuna.model.inputs import Inputs
from lacuna.model.router import Router, router_loss
from lacuna.parallel.backbone import backbone
from lacuna.parallel.tensor import gather_sequence_slices

# Logits of a chunk take about this much memory in float32; larger chunks gain no speed.
CHUNK_BYTES = 1024 * 2**20


Columns = Mapping[str, Tensor]
Sums = dict[str, Tensor]


@dataclass(frozen=True)
class TokenLoss:
    """A loss that is a sum over tokens, each of which has one by its own logits.

    Attributes:
        of: makes of logits [tokens, vocabulary], float32, and columns [tokens] sums over the
            tokens, float32 scalars.
        names: theirs. The first, `loss`, is minimised; the others have no gradient and are
            reported.
    """

    of: Callable[[Tensor, Columns], Sums]
    names: tuple[str, ...] = ("loss",)


@dataclass(frozen=True)
class Head:
    """How logits are made: chunk by chunk from the head's weight, or by the model itself.

    What a model does to the logits after its head's matrix product is to scale, then to cap them
    softly, as Gemma-2, Cohere and Granite do: `cap * tanh(scale * logits / cap)`. With a `router`
    its load-balancing loss is added.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    chunked: bool = True
    compiled: bool = False
    router: Router | None = None

    def logits(self, product: Tensor) -> Tensor:
        """The model's logits from the head's product, in float32."""
        logits = product.float() * self.scale if self.scale != 1.0 else product.float()
        return (
            logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
        )

    def sums(self, product: Tensor, columns: Columns, loss: TokenLoss) -> Tensor:
        """The sums of tokens whose head's product is `product` [tokens, vocabulary], float32 [names]."""
        sums = loss.of(self.logits(product), columns)
        return torch.stack([sums[name].float() for name in loss.names])


def _gradient_and_sums(
    product: Tensor, columns: Columns, head: Head, loss: TokenLoss
) -> tuple[Tensor, Tensor]:
    """The gradient of a chunk's loss with respect to `product`, and the sums."""

    def with_sums(product: Tensor) -> tuple[Tensor, Tensor]:
        sums = head.sums(product, columns, loss)
        return sums[0], sums

    gradient, (_, sums) = torch.func.grad_and_value(with_sums, has_aux=True)(product)
    return gradient, sums


_compiled_gradient_and_sums = torch.compile(_gradient_and_sums, fullgraph=True, dynamic=False)


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to the float32 `total` in place, without rounding a half-precision product first."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


class _ChunkedTokenLoss(torch.autograd.Function):
    """Computes gradients along with the loss: one product fewer than recomputing, and no logits kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: Columns,
        head: Head,
        loss: TokenLoss,
        chunk: int,
    ) -> Tensor:
        step = (
            _compiled_gradient_and_sums if head.compiled and hidden.is_cuda else _gradient_and_sums
        )
        total = torch.zeros(len(loss.names), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        bias_gradient = (
            torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        )
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            of_part = {name: column[part] for name, column in columns.items()}
            gradient, sums = step(F.linear(hidden[part], weight, bias), of_part, head, loss)
            total += sums
            torch.mm(gradient, weight, out=hidden_gradient[part])
            if weight_gradient is not None:
                _accumulate_product(weight_gradient, gradient.t(), hidden[part])
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=torch.float32)
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in float32 and rounded once; not in place: zero-bubble pipelines come here twice.
        scaled = (
            None
            if gradient is None
            else torch.mul(gradient, upstream[0], out=torch.empty_like(gradient, dtype=ctx.dtype))
            for gradient in ctx.saved_tensors
        )
        return (*scaled, None, None, None, None)


def chunked_sums(
    linear: nn.Linear, head: Head, loss: TokenLoss, hidden: Tensor, columns: Columns, chunk: int = 0
) -> Tensor:
    """The sums of `loss` over tokens whose logits are `head.logits(linear(hidden))`, float32 [names].

    `hidden` [tokens, width], the weight [vocabulary, width], `columns` [tokens]. Only the first,
    which is minimised, has a gradient. Logits exist for `chunk` tokens at a time (0: as many as fit
    `CHUNK_BYTES`), and the weight's gradient is accumulated over the chunks in float32.
    `head.compiled` fuses the elementwise work (GPU). Gradients are computed in the forward pass, as
    in Liger (arXiv 2410.10989).
    """
    weight, bias = linear.weight, linear.bias
    hidden = hidden.to(weight.dtype)  # some models keep their head in float32
    size = (
        CHUNK_BYTES if weight.requires_grad else CHUNK_BYTES // 4
    )  # a frozen head has no gradient to add to
    chunk = chunk or max(256, size // (4 * len(weight)) // 256 * 256)
    if torch.is_grad_enabled():
        return _ChunkedTokenLoss.apply(hidden, weight, bias, columns, head, loss, chunk)
    total = torch.zeros(len(loss.names), dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        of_part = {name: column[part] for name, column in columns.items()}
        total += head.sums(F.linear(hidden[part], weight, bias), of_part, loss)
    return total


def hidden_states(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """What the head is given [B, T, width]."""
    return backbone(model)(**inputs.arguments).last_hidden_state


def loss_sums(
    model: PreTrainedModel,
    head: Head,
    loss: TokenLoss,
    inputs: Inputs,
    divisor: Tensor | None = None,
) -> Tensor:
    """The sums of `loss` over the tokens of `inputs`, float32 [names].

    Where hidden states of the whole sequence are gathered first, every rank takes its share of the
    same loss. Where the head has a router and `divisor` says by what the loss will be divided, its
    own loss is added as often.
    """
    if head.chunked:
        output = backbone(model)(**inputs.arguments)
        states = output.last_hidden_state
    else:
        output = type(model).forward(model, **inputs.arguments)
        states = output.logits
    if inputs.gather is not None:
        states = gather_sequence_slices(states, inputs.gather)
    states = states.flatten(0, 1)
    columns = {name: column.flatten() for name, column in inputs.columns.items()}
    if head.chunked:
        sums = model.get_output_embeddings().loss_sums(head, loss, states, columns)
    else:
        sums = head.sums(states, columns, loss)
    if inputs.gather is not None:
        sums = sums / inputs.gather.size()
    if head.router is not None and divisor is not None:
        balance = router_loss(head.router, output.router_logits, columns["real"])
        sums = sums + F.pad((balance * divisor)[None], (0, len(loss.names) - 1))
    return sums


def attach_loss(model: PreTrainedModel) -> None:
    """Gives `model` the method `loss_sums(head, loss, inputs, divisor)`, in place.

    Methods of the model and of its head and not functions around them, so that sharding gathers
    what they need.
    """
    for module, method in ((model, loss_sums), (model.get_output_embeddings(), chunked_sums)):
        if module is not None:
            module.loss_sums = MethodType(method, module)
            register_fsdp_forward_method(module, "loss_sums")


def relative_difference(left: Tensor, right: Tensor) -> float:
    """The norm of the difference of two tensors, relative to that of the second."""
    return ((left.float() - right.float()).norm() / right.float().norm().clamp(min=1e-12)).item()


@torch.no_grad()
def probe_head(model: PreTrainedModel, compiled: bool) -> Head:
    """Compares the chunked path with the model's own logits on a few tokens and decides which one to use.

    The chunked path knows of what the configuration speaks: Gemma's soft cap, Cohere's and
    Granite's scales. They are compared as they are, and with the head's weight enlarged: near zero
    a soft cap would not show.
    """
    text_config, linear = model.config.get_text_config(), model.get_output_embeddings()
    scale = (getattr(text_config, "logit_scale", None) or 1.0) / (
        getattr(text_config, "logits_scaling", None) or 1.0
    )
    head = Head(
        float(scale), getattr(text_config, "final_logit_softcapping", None), compiled=compiled
    )
    known = isinstance(linear, nn.Linear)
    ids = torch.arange(16)[None].to(model.device) % text_config.vocab_size
    arguments = {"input_ids": ids, "use_cache": False}
    for factor in (1, 1024) if known else ():
        linear.weight.mul_(factor)
        logits = model(**arguments).logits
        hidden = backbone(model)(**arguments).last_hidden_state
        # Not the layer's own output: an adapter or a hook may have changed that, which the chunked
        # path would miss.
        product = F.linear(hidden.to(linear.weight.dtype), linear.weight, linear.bias)
        linear.weight.div_(factor)
        known &= relative_difference(head.logits(product), logits) < 1e-4
    if known:
        return head
    logger.info(
        "the head does more than lacuna knows: the loss is made from the model's own logits"
    )
    return Head(chunked=False)
