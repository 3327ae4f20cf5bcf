"""Cross-entropy of a linear head, a chunk of tokens at a time: the (tokens × vocabulary) matrix never exists."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
# Logits of a chunk take about this much memory in float32; larger chunks gain no speed.
CHUNK_BYTES = 1024 * 2**20


@dataclass(frozen=True)
class Head:
    """How the loss is made: chunk by chunk from the head's weight, or from the model's own logits.

    What a model does to the logits after its head's matrix product is to scale, then to cap them softly, as Gemma-2,
    Cohere and Granite do: `cap * tanh(scale * logits / cap)`.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    chunked: bool = True
    compiled: bool = False

    def logits(self, product: Tensor) -> Tensor:
        """The model's logits from the head's product, in float32."""
        logits = product.float() * self.scale if self.scale != 1.0 else product.float()
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def loss(self, product: Tensor, labels: Tensor) -> Tensor:
        """The summed cross-entropy of tokens whose head's product is `product` [tokens, vocabulary]."""
        return F.cross_entropy(self.logits(product), labels, ignore_index=IGNORED, reduction="sum")

    def tried(self, product: Tensor, labels: Tensor) -> Tensor:
        """Float32 [2]: that loss, and of how many labels the likeliest token is right."""
        return torch.stack([self.loss(product, labels), (product.argmax(-1) == labels).sum()])


def _gradient_and_loss(product: Tensor, labels: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """The gradient of a chunk's loss with respect to `product`, and the loss."""
    return torch.func.grad_and_value(head.loss)(product, labels)


_compiled_gradient_and_loss = torch.compile(_gradient_and_loss, fullgraph=True, dynamic=False)


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to the float32 `total` in place, without rounding a half-precision product first."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Computes gradients along with the loss: one product fewer than recomputing, and no logits kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head, chunk: int
    ) -> Tensor:
        step = _compiled_gradient_and_loss if head.compiled and hidden.is_cuda else _gradient_and_loss
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            gradient, chunk_loss = step(F.linear(hidden[part], weight, bias), labels[part], head)
            loss += chunk_loss
            torch.mm(gradient, weight, out=hidden_gradient[part])
            if weight_gradient is not None:
                _accumulate_product(weight_gradient, gradient.t(), hidden[part])
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=torch.float32)
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in float32 and rounded once; not in place: zero-bubble pipelines come here twice.
        scaled = (
            None if gradient is None else torch.mul(gradient, upstream, out=torch.empty_like(gradient, dtype=ctx.dtype))
            for gradient in ctx.saved_tensors
        )
        return (*scaled, None, None, None)


def chunked_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, head: Head | None = None, chunk: int = 0
) -> Tensor:
    """Summed cross-entropy (nats) of `head.logits(hidden @ weight.T + bias)` against `labels`, in float32.

    `hidden` [tokens, width], `weight` [vocabulary, width], `labels` int64 [tokens], `IGNORED` where not trained.
    Equals `F.cross_entropy(..., reduction="sum")`; logits exist for `chunk` tokens at a time (0: as many as
    fit `CHUNK_BYTES`), and the weight's gradient is accumulated over the chunks in float32. `head.compiled` fuses the
    elementwise work (GPU). Gradients are computed in the forward pass, as in Liger (arXiv 2410.10989). Where none are
    wanted the result is `head.tried`.
    """
    head = head or Head()
    chunk = chunk or max(256, CHUNK_BYTES // (4 * len(weight)) // 256 * 256)
    if torch.is_grad_enabled():
        return _ChunkedLinearCrossEntropy.apply(hidden, weight, bias, labels, head, chunk)
    parts = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    return torch.stack([head.tried(F.linear(states, weight, bias), targets) for states, targets in parts]).sum(0)
