"""Fixes, for a run, rotary frequencies that would follow the longest position of each call."""

import torch
from torch import nn


def fix_rotations(model: nn.Module, length: int) -> list[str]:
    """Has every call of a model rotate as a call of `length` positions would, in place.

    transformers recomputes `dynamic` frequencies, and chooses those of `longrope`, by the longest
    position of a call, so that a document would depend on those beside it. Returns descriptions of
    the frequencies that were chosen.
    """
    descriptions = []
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in by_layer.items():
            if kind is None or not ("dynamic" in kind or kind == "longrope"):
                continue
            chosen = _choose_frequencies(module, layer, length)
            descriptions.append(f"{name}: {kind}, {chosen}")
            if layer is None:
                module.rope_type = "default"
            else:
                by_layer[layer] = "default"
    return descriptions


@torch.no_grad()
def _choose_frequencies(module: nn.Module, layer: str | None, length: int) -> str:
    """Has a module choose its frequencies by a call of `length` positions; says which they are."""
    buffer = "inv_freq" if layer is None else f"{layer}_inv_freq"
    before = getattr(module, buffer).clone()
    named = {} if layer is None else {"layer_type": layer}
    positions = torch.tensor([[length - 1]], device=before.device)
    module(torch.zeros(1, 1, 1, device=before.device), positions, **named)
    longer = not torch.equal(before, getattr(module, buffer))
    return f"{'longer' if longer else 'original'} frequencies for {length:,} positions"
