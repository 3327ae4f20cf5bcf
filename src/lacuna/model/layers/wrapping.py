"""How a layer of Hugging Face's is replaced: what may wrap what, and how it becomes plain again.

A module is wrapped by giving it a class that derives from the class that it has. It stays the same
module, its parameters keep their names, and in the wrapper's methods `super()` is what is wrapped.
"""

from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Place(IntEnum):
    """The order of wrapping: each goes around those before it, and all around the plain layer."""

    PRODUCT = 1  # how the layer multiplies: with a weight that is quantised, or in few bits
    ADAPTER = 2  # what learns beside the weight
    CAST = 3  # in which precision weights are read


class Wrapper(nn.Module):
    """What wrappers have in common. None is ever made: `wrap` mixes it into a module's class.

    Attributes:
        place: where it is in the order of wrapping.
        wrapped: the class that it goes around.
        brought: the names of the parameters and modules that a module has of its wrappers.
        takes_adapter: whether `forward` also takes an adapter, to add what that makes by itself.
    """

    place: ClassVar[Place]
    wrapped: ClassVar[type[nn.Module]]
    brought: ClassVar[tuple[str, ...]] = ()
    takes_adapter: ClassVar[bool] = False

    @property
    def is_packed(self) -> bool:
        """Whether the weight is stored as bytes that are no numbers."""
        return False

    def stored_weight(self, name: str, weight: Tensor) -> Tensor:
        """What is stored in the place of a plain layer's `weight` of this name."""
        return weight

    def plain_weight(self, name: str) -> Tensor:
        """What a plain layer's weight of this name would be, for it to compute the same: whole.

        It is float32 where it is not the stored weight itself. Every rank that has a share of the
        module must call it.
        """
        # Not `getattr`, which gives what a wrapper casts in less precision.
        return whole_tensor(self._parameters[name])


def wrap(module: nn.Module, wrapper: type[Wrapper], /, **known: Any) -> None:
    """Wraps a module, in place; what is `known` becomes attributes of its class.

    Raises `TypeError` where the order of `Place` does not allow it.
    """
    kind = type(module)
    if issubclass(kind, Wrapper) and kind.place >= wrapper.place:
        raise TypeError(f"{wrapper.__name__} does not go around {kind.__name__}")
    module.__class__ = _wrapping(kind, wrapper, tuple(known.items()))


@cache
def _wrapping(
    kind: type[nn.Module], wrapper: type[Wrapper], known: tuple[tuple[str, Any], ...]
) -> type[nn.Module]:
    """The class that wraps this kind of module: one for all, or each would be compiled anew."""
    name = wrapper.__name__ + kind.__name__
    return type(name, (wrapper, kind), {"wrapped": kind, **dict(known)})


def unwrap(module: nn.Module) -> None:
    """Takes off, in place, all that wraps a module; its stored weights stay as they are."""
    kind = type(module)
    while issubclass(kind, Wrapper):
        kind = kind.wrapped
    for name in getattr(module, "brought", ()):
        module._parameters.pop(name, None)
        module._modules.pop(name, None)
    module.__class__ = kind


def wrapped_modules(model: nn.Module) -> Iterator[Wrapper]:
    """The modules of a model that something wraps."""
    return (module for module in model.modules() if isinstance(module, Wrapper))


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Makes every module of a model that is whole plain, in place, and lets all of it learn.

    Quantised weights are dequantised, and adapters put into the weights beside them: these become
    float32.
    """
    for module in [*wrapped_modules(model)]:
        for name, stored in [*module._parameters.items()]:
            if stored is None or name in module.brought:
                continue
            plain = module.plain_weight(name)
            if plain is not stored:
                setattr(module, name, nn.Parameter(plain))
        unwrap(module)
    model.requires_grad_(True)


@torch.no_grad()
def plain_tensor(model: nn.Module, name: str) -> Tensor:
    """The tensor of this name that the model would have with plain layers, whole.

    It is float32 where it is quantised, or where an adapter is beside it, which is then in it.
    Every rank that has a share of it must call it.
    """
    place, _, own_name = name.rpartition(".")
    module = model.get_submodule(place)
    if isinstance(module, Wrapper) and own_name in module._parameters:
        return module.plain_weight(own_name)
    return whole_tensor(getattr(module, own_name))


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor of which this rank may have a share only, whole.

    Every rank that has one must call it.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
