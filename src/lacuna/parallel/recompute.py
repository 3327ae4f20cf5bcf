"""Activation checkpointing: what the forward pass forgets and the backward pass computes again."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from lacuna.config import UserError
from lacuna.config.machine import ActivationCheckpointConfig


def recompute(layers: Sequence[nn.Module], settings: ActivationCheckpointConfig) -> None:
    """Has layers recompute their activations as the settings say, in place.

    A layer's forward is replaced instead of wrapping the layer, so that parameters keep their
    names. Layers whose parts recompute by operation (`recomputes_parts`) are left as they are.
    Raises `UserError` for a memory budget beside dropout, which torch 2.13 then draws anew in the
    backward pass: gradients are those of another loss (docs/log.md).
    """
    require_no_dropout(layers, settings.mode)
    if settings.mode == "memory_budget":
        torch._functorch.config.activation_memory_budget = settings.memory_budget
    if settings.mode not in ("full", "selective"):
        return
    by_number = settings.mode == "selective" and not is_by_operation(settings)
    every = int(settings.selective_ac_option) if by_number else 1
    for number, layer in [*enumerate(layers)][every - 1 :: every]:
        kept = {}
        if is_by_operation(settings):
            from lacuna.parallel.kept_operations import keeping_operations  # an extension

            kept = {"context_fn": keeping_operations(settings, number)}
        if not hasattr(layer, "recomputes_parts"):
            layer.forward = with_checkpointing(layer.forward, **kept)


def require_no_dropout(layers: Iterable[nn.Module], mode: str) -> None:
    """Raises `UserError` where layers draw, and torch would draw anew in the backward pass."""
    if mode == "memory_budget" and any(
        _draws(module) for layer in layers for module in layer.modules()
    ):
        raise UserError(
            "activation_checkpoint.mode: with memory_budget torch would compute dropout again from "
            "other random numbers, and gradients would be wrong: set the dropout and jitter of the "
            "model's configuration (and lora.dropout) to 0, or choose another mode."
        )


def _draws(module: nn.Module) -> bool:
    """Whether a module, its parts left out, draws: it has a share of dropout, or jitter, above 0.

    That is known by the names of its settings, torch's, ours or its own.
    """
    shares = [value for name, value in vars(module).items() if "drop" in name or "jitter" in name]
    shares += [module.p] if isinstance(module, _DropoutNd) else []
    shares += [getattr(module, "adapter_dropout", 0.0)]
    return any(isinstance(share, float) and share > 0 for share in shares)


def is_by_operation(settings: ActivationCheckpointConfig) -> bool:
    """Whether the results of some operations are kept, and all others computed again."""
    return settings.mode == "selective" and not settings.selective_ac_option.isdecimal()


def halved_every(settings: ActivationCheckpointConfig) -> float:
    """Of how many layers one keeps half of its products alone: 4 by `op/4`; infinity if none."""
    option, _, every = settings.selective_ac_option.partition("/")
    return int(every or 1) if option == "op" else math.inf


def with_checkpointing(forward: Callable[..., Any], **kept: Any) -> Callable[..., Any]:
    """A function that keeps its inputs, and what is `kept` besides, and computes the rest again.

    That is a `context_fn` of torch's selective checkpointing, or nothing.
    """

    # It is no `partial`, which would not compile as one graph.
    def repeatable(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **kept, **named)

    return repeatable
