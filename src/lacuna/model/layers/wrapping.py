"""How a layer of Hugging Face's is replaced: what may wrap what, and how it becomes plain again.

A module is wrapped by giving it a class that derives from the class that it had. It stays the same
module, its parameters keep their names, and in the wrapper's methods `super()` is what is wrapped.
"""

from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Place(IntEnum):
    """The order of wrapping: each goes around those before it, and all around the plain layer."""

    PRODUCT = 1  # how the layer multiplies: with a quantised weight, or in few bits
    ADAPTER = 2  # an adapter that learns beside the weight
    CAST = 3  # a cast of weights when they are read


Wrapping = TypeVar("Wrapping", bound="Wrapper")


class Wrapper(nn.Module):
    """What wrappers have in common. None is ever made by itself: `wrap` mixes it into a class.

    Attributes:
        place: where the wrapper is in the order of wrapping.
        wrapped: the class that it goes around.
        added_names: the names of the parameters and modules that wrappers add to a module.
        takes_adapter: whether `forward` also takes an adapter, and adds that one's output itself.
    """

    place: ClassVar[Place]
    wrapped: ClassVar[type[nn.Module]]
    added_names: ClassVar[tuple[str, ...]] = ()
    takes_adapter: ClassVar[bool] = False

    @property
    def packed_names(self) -> tuple[str, ...]:
        """The names of the weights that are stored as bytes that are no numbers."""
        return ()

    def stored_weight(self, name: str, weight: Tensor) -> Tensor:
        """The tensor that is stored where a plain layer would store this `weight`."""
        return weight

    def plain_weight(self, name: str) -> Tensor:
        """The whole weight of this name with which a plain layer would compute the same.

        It is float32 where it is not the stored weight itself. Every rank that has a share of the
        module must call it.
        """
        return whole_tensor(stored_parameter(self, name))


def stored_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter of this name as a module stores it.

    `getattr` would give what a wrapper casts to less precision.
    """
    parameter = module._parameters[name]
    assert parameter is not None, f"{type(module).__name__} has no {name}"
    return parameter


def wrap(module: nn.Module, wrapper: type[Wrapping], /, **known: Any) -> Wrapping:
    """Wraps a module, in place, and returns it.

    What is `known` becomes attributes of its class. Raises `TypeError` where the order of `Place`
    does not allow the wrapper.
    """
    kind = type(module)
    if issubclass(kind, Wrapper) and kind.place >= wrapper.place:
        raise TypeError(f"{wrapper.__name__} does not go around {kind.__name__}")
    # mypy does not see that classes are hashable.
    module.__class__ = _wrapper_class(kind, wrapper, tuple(known.items()))  # type: ignore[arg-type]
    return cast(Wrapping, module)


@cache
def _wrapper_class(
    kind: type[nn.Module], wrapper: type[Wrapper], known: tuple[tuple[str, Any], ...]
) -> type[nn.Module]:
    """The class that wraps this kind of module.

    It is one for all such modules, since each class would be compiled anew.
    """
    return type(wrapper.__name__ + kind.__name__, (wrapper, kind), {"wrapped": kind, **dict(known)})


def unwrap(module: nn.Module) -> None:
    """Removes all wrappers of a module, in place; its stored weights stay as they are."""
    kind = type(module)
    while issubclass(kind, Wrapper):
        kind = kind.wrapped
    for name in getattr(module, "added_names", ()):
        module._parameters.pop(name, None)
        module._modules.pop(name, None)
    module.__class__ = kind


def wrapped_modules(model: nn.Module) -> Iterator[Wrapper]:
    """The modules of a model that something wraps."""
    return (module for module in model.modules() if isinstance(module, Wrapper))


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Makes every module of a whole model plain, in place, and lets all of it learn.

    Quantised weights are dequantised, and adapters are merged into the weights beside them. Such
    weights become float32.
    """
    for module in [*wrapped_modules(model)]:
        for name, stored in [*module._parameters.items()]:
            if stored is None or name in module.added_names:
                continue
            plain = module.plain_weight(name)
            if plain is not stored:
                setattr(module, name, nn.Parameter(plain))
        unwrap(module)
    model.requires_grad_(True)


@torch.no_grad()
def plain_tensor(model: nn.Module, name: str) -> Tensor:
    """The whole tensor of this name that a model of plain layers would have, to compute the same.

    It is float32 where it was quantised, or where an adapter was merged into it. Every rank that
    has a share of it must call this.
    """
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, Wrapper) and own_name in module._parameters:
        return module.plain_weight(own_name)
    return whole_tensor(getattr(module, own_name))


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which this rank may have only a share.

    Every rank that has a share must call it.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
