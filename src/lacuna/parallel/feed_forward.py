"""Feed-forward blocks of flash-linear-attention's layers as plain PyTorch, which is compiled."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.parallel.kept_operations import keeping_operations
from lacuna.parallel.recompute import is_by_operation, with_checkpointing

Result = Tensor | tuple[Tensor, Tensor]


def compile_feed_forward(layers: Sequence[nn.Module], settings: ActivationCheckpointConfig) -> None:
    """Has feed-forward blocks of fla's layers, and the norms before them, be compiled, in place.

    fla's own kernels break the graph of a whole layer. In plain PyTorch a block is one graph, whose
    norm is computed again instead of kept. Where operations are kept (`is_by_operation`), nothing
    else of such layers is recomputed: fla's kernels would take long for the memory that they spare.
    """
    for number, layer in enumerate(layers):
        by_operation = is_by_operation(settings)
        kept = {"context_fn": keeping_operations(settings, number)} if by_operation else {}
        for block in layer.modules():
            feed_forward: Any = getattr(block, "mlp", None)
            if _is_swiglu(feed_forward):
                norm = getattr(block, "mlp_norm", None)
                _compile_block(feed_forward, norm if _is_rms_norm(norm) else None, kept)
                if by_operation:
                    setattr(layer, "recomputes_parts", True)  # noqa: B010


def _is_swiglu(module: Any) -> bool:
    return type(module).__name__ == "GatedMLP" and module.hidden_act == "swish"


def _is_rms_norm(module: nn.Module | None) -> bool:
    return type(module).__name__ == "RMSNorm" and not isinstance(module, nn.RMSNorm)


def _compile_block(feed_forward: nn.Module, norm: nn.Module | None, kept: dict[str, Any]) -> None:
    """Has a block be compiled, in place, and the `norm` before it leave its work to the block.

    What is `kept` is for `with_checkpointing`.
    """
    compute = _compiled(**kept)
    # What the norm was given last, for the block to compute.
    left: list[Tensor] = []
    own: Any = norm.forward if norm is not None else None

    def block(hidden: Tensor, **_: Any) -> Tensor:
        is_to_be_normed = bool(left) and left[0] is hidden
        left.clear()
        return compute(feed_forward, norm if is_to_be_normed else None, hidden)

    def leave_to_block(
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Result:
        if residual_in_fp32:
            found: Result = own(x, residual, prenorm, residual_in_fp32)
            return found
        total = x if residual is None else x + residual
        left[:] = [total]
        return (total, total) if prenorm else total

    setattr(feed_forward, "forward", block)  # noqa: B010
    if norm is not None:
        setattr(norm, "forward", leave_to_block)  # noqa: B010


def normed_swiglu(feed_forward: Any, norm: Any, hidden: Tensor) -> Tensor:
    """What such a block makes of hidden states [B, T, width], which a `norm` is for, if any."""
    if norm is not None:
        hidden = _rms_norm(hidden, norm.weight, norm.bias, norm.eps)
    gate = F.silu(feed_forward.gate_proj(hidden))
    made: Tensor = feed_forward.down_proj(gate * feed_forward.up_proj(hidden))
    return made


def _rms_norm(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(hidden.dtype)


@cache
def _compiled(context_fn: Callable[[], Any] | None = None) -> Callable[..., Tensor]:
    """One graph for the blocks of all layers; with `context_fn` it computes the rest again."""
    again = context_fn is not None
    function = with_checkpointing(normed_swiglu, context_fn=context_fn) if again else normed_swiglu
    return torch.compile(function, fullgraph=True)
