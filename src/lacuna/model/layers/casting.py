"""Modules that cast their weights when they use them, to compute in less precision than is stored."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lacuna.model.layers.wrapping import Place, Wrapper, wrap
from lacuna.parallel.precision import kept_in_float32


class Cast(Wrapper):
    """A module some of whose weights are properties, which cast what is stored."""

    place = Place.CAST


@cache
def _cast_weight(name: str, dtype: torch.dtype) -> property:
    """A weight that is cast when it is read, but for a sharded one, as FSDP reads it."""

    def cast(module: nn.Module) -> Tensor | None:
        weight = module._parameters[name]
        return weight if isinstance(weight, DTensor) or weight is None else weight.to(dtype)

    return property(cast)


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Has a model of which nothing else casts weights compute in `dtype`, in place.

    Weights and gradients stay as they are. A module casts its weights wherever it uses them,
    which compiled code does between its other work, and needs no second copy of the model; an
    embedding casts what it has looked up. Not cast are packed weights, and what transformers keeps
    in float32.
    """
    kept = kept_in_float32(model, dtype)
    for path, module in model.named_modules():
        weights = dict(module.named_parameters(recurse=False))
        if isinstance(module, Wrapper) and module.is_packed:
            del weights["weight"]
        names = [
            name
            for name, weight in weights.items()
            if weight.is_floating_point() and weight.dtype != dtype and f"{path}.{name}" not in kept
        ]
        if names and isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _, __, found: found.to(dtype))
        elif names:
            wrap(module, Cast, **{name: _cast_weight(name, dtype) for name in names})
