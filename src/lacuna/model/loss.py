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
class HeadTransform:
    """What a model does to the logits after its head's matrix product: scale, then soft cap, as Gemma-2,
    Cohere and Granite do: `cap * tanh(scale * logits / cap)`."""

    scale: float = 1.0
    soft_cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """The model's logits from the head's product, in float32."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


def _chunk_loss_and_gradient(product: Tensor, labels: Tensor, scale: float, soft_cap: float) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of one chunk, and its gradient with respect to `product` [tokens, vocabulary].

    `soft_cap` 0 stands for none. The gradient is (softmax − one-hot), through the transform.
    """
    logits = product.float() * scale
    if soft_cap:
        squashed = torch.tanh(logits / soft_cap)
        logits = squashed * soft_cap
    kept = labels != IGNORED
    target = torch.where(kept, labels, 0)
    log_normalizer = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(-1, target[:, None]).squeeze(-1)
    loss = torch.where(kept, log_normalizer - picked, 0.0).sum()
    gradient = torch.exp(logits - log_normalizer[:, None])
    columns = torch.arange(logits.shape[-1], device=logits.device)
    gradient = torch.where(columns[None, :] == target[:, None], gradient - 1.0, gradient)
    if soft_cap:
        gradient = gradient * (1.0 - squashed * squashed)
    gradient = torch.where(kept[:, None], gradient * scale, 0.0)
    return loss, gradient.to(product.dtype)


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to the float32 `total` in place, without rounding a half-precision product first."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Computes gradients along with the loss: one product fewer than recomputing, and no logits kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
        transform: HeadTransform, chunk: int, compiled: bool,
    ) -> Tensor:  # fmt: skip
        step = _compiled_chunk() if compiled else _chunk_loss_and_gradient
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            product = F.linear(hidden[part], weight, bias)
            chunk_loss, gradient = step(product, labels[part], transform.scale, transform.soft_cap or 0.0)
            loss += chunk_loss
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[part])
            if weight_gradient is not None:
                _accumulate_product(weight_gradient, gradient.t(), hidden[part])
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=torch.float32)
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors

        def scaled(gradient: Tensor) -> Tensor:
            """Scaled in float32 and rounded once; not in place: zero-bubble pipelines come here twice."""
            return torch.mul(gradient, upstream, out=torch.empty_like(gradient, dtype=ctx.weight_dtype))

        return (
            hidden * upstream.to(hidden.dtype) if hidden is not None else None,
            scaled(weight) if weight is not None else None,
            scaled(bias) if bias is not None else None,
            None, None, None, None,
        )  # fmt: skip


_COMPILED: list[Any] = []


def _compiled_chunk() -> Any:
    if not _COMPILED:
        _COMPILED.append(torch.compile(_chunk_loss_and_gradient, fullgraph=True, dynamic=False))
    return _COMPILED[0]


def chunked_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    transform: HeadTransform | None = None,
    chunk: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Summed cross-entropy (nats) of `transform(hidden @ weight.T + bias)` against `labels`, in float32.

    `hidden` [tokens, width], `weight` [vocabulary, width], `labels` int64 [tokens], `IGNORED` where not trained.
    Equals `F.cross_entropy(..., reduction="sum")`; logits exist for `chunk` tokens at a time (default: as many as
    fit `CHUNK_BYTES`), and the weight's gradient is accumulated over the chunks in float32. `compiled` fuses the
    elementwise work (GPU). Gradients are computed in the forward pass, as in Liger (arXiv 2410.10989).
    """
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    chunk = chunk or max(256, CHUNK_BYTES // (4 * vocabulary) // 256 * 256)
    transform = transform or HeadTransform()
    if not torch.is_grad_enabled():
        parts = (
            F.cross_entropy(
                transform.apply(F.linear(hidden[start : start + chunk], weight, bias)),
                labels[start : start + chunk], ignore_index=IGNORED, reduction="sum",
            )
            for start in range(0, tokens, chunk)
        )  # fmt: skip
        return torch.stack(list(parts)).sum()
    return _ChunkedLinearCrossEntropy.apply(hidden, weight, bias, labels, transform, chunk, compiled)
