"""Rotary positions whose frequencies follow the longest position of each call: fixed for a run."""

import torch
from torch import nn


def fix_rotations(model: nn.Module, length: int) -> list[str]:
    """Has every call of a model rotate as one of `length` positions would, in place.

    transformers recomputes `dynamic` frequencies and chooses those of `longrope` by the longest
    position of a call, so that a document would depend on those beside it. Says what was chosen.
    """
    said = []
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in by_layer.items():
            if kind is None or not ("dynamic" in kind or kind == "longrope"):
                continue
            said.append(f"{name}: {kind}, {_choose(module, layer, length)}")
            if layer is None:
                module.rope_type = "default"
            else:
                kinds[layer] = "default"
    return said


@torch.no_grad()
def _choose(module: nn.Module, layer: str | None, length: int) -> str:
    """Has a module of rotations choose by a call of `length` positions; says what that is."""
    buffer = "inv_freq" if layer is None else f"{layer}_inv_freq"
    before = getattr(module, buffer).clone()
    named = {} if layer is None else {"layer_type": layer}
    positions = torch.tensor([[length - 1]], device=before.device)
    module(torch.zeros(1, 1, 1, device=before.device), positions, **named)
    longer = not torch.equal(before, getattr(module, buffer))
    return f"{'longer' if longer else 'original'} frequencies for {length:,} positions"
