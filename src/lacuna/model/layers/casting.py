"""Modules that cast their weights on use, to compute in less precision than they are stored in."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lacuna.model.layers.wrapping import Place, Wrapper, wrap
from lacuna.parallel.precision import kept_in_float32


class Cast(Wrapper):
    """A module of which some weights are properties, which cast the stored weights."""

    place = Place.CAST


@cache
def _cast_weight(name: str, dtype: torch.dtype) -> property:
    """A property that casts a weight when it is read, but not when FSDP reads it sharded."""

    def cast(module: nn.Module) -> Tensor | None:
        weight = module._parameters[name]
        return weight if isinstance(weight, DTensor) or weight is None else weight.to(dtype)

    return property(cast)


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Has a model compute in `dtype`, in place, where nothing else casts its weights.

    Weights and gradients are stored as before. A module casts its weights wherever it uses them,
    which compiled code does along with its other work, so that no second copy of the model is
    needed; an embedding casts what it has looked up. Packed weights, and what transformers keeps in
    float32, are not cast.
    """
    kept = kept_in_float32(model, dtype)
    for path, module in model.named_modules():
        packed = module.packed_names if isinstance(module, Wrapper) else ()
        names = [
            name
            for name, weight in module.named_parameters(recurse=False)
            if weight.is_floating_point() and weight.dtype != dtype and f"{path}.{name}" not in kept
            if name not in packed
        ]
        if names and isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _, __, found: found.to(dtype))
        elif names:
            wrap(module, Cast, **{name: _cast_weight(name, dtype) for name in names})
