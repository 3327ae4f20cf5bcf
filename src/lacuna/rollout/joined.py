"""One product in place of several while generating: of linear layers that take the same input."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lacuna.config import logger
from lacuna.model.layers.casting import Cast
from lacuna.model.layers.lora import Lora
from lacuna.model.layers.wrapping import Wrapper, stored_parameter
from lacuna.model.probe import in_one_line
from lacuna.rollout.pages import Pool
from lacuna.rollout.passes import prompt_logits

# The names of linear layers that take the same input, by the model.
_known: WeakKeyDictionary[PreTrainedModel, list[list[str]]] = WeakKeyDictionary()
# What GPUs multiply fast has widths that are multiples of this.
_WIDTHS = 8
# Bytes: compiled code reads what begins at no multiple of this from a copy.
_ALIGNED = 16


class Product:
    """The product of an input and several weights, which are rows of one matrix.

    The first layer that is given an input makes all of it, and the last one forgets it, so that
    compiled code has one product, and nothing that outlives it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> None:
        self.weight = weight
        self.bias = bias
        self.sizes = sizes
        self.hidden: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def part(self, number: int, hidden: Tensor) -> Tensor:
        """What the layer of this number, in the order in which they are called, makes of it."""
        if self.hidden is not hidden:
            self.hidden = hidden
            whole: Tensor = F.linear(hidden, self.weight, self.bias)
            self.parts = tuple(whole.split(self.sizes, -1))
        found = self.parts[number]
        if number == len(self.sizes) - 1:
            self.hidden = None
            self.parts = ()
        return found


class Joined(nn.Module):
    """A linear layer whose output is a part of a product. It is only ever mixed into a class.

    Attributes:
        product: that of the layer's weight and others, and the layer's `number` in it.
    """

    product: Product
    number: int

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output."""
        return self.product.part(self.number, hidden)


class JoinedLora(Joined):
    """An adapted linear layer of which both products of its input are parts of others.

    Attributes:
        narrow_product: that of `lora_A` and others, and its `narrow_number` in it.
    """

    narrow_product: Product
    narrow_number: int
    adapter_scale: float
    lora_B: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        """The sum of the layer's output and the adapter's, as `Lora` has it without dropout."""
        narrow = self.narrow_product.part(self.narrow_number, hidden)
        return super().forward(hidden) + F.linear(self.adapter_scale * narrow, self.lora_B)


@cache
def _joined_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of joined layers of a kind: one for all, since each would be compiled anew."""
    joined_kind = JoinedLora if issubclass(kind, Lora) else Joined
    return type(joined_kind.__name__ + kind.__name__, (joined_kind, kind), {"wrapped": kind})


def of_one_input(model: PreTrainedModel, device: torch.device) -> list[list[str]]:
    """The names of linear layers that a model in pages gives the same input, in their order.

    It is found by a forward pass of a few tokens, once for each model; and by another that they can
    be joined, if that can be tried. Layers that are compiled apart are kept apart.
    """
    if model not in _known:
        found = _known[model] = _called_with_one(model, device)
        try:
            with joined(model, found):
                if found:
                    _pass(model, device)
        except RuntimeError as fault:  # such as of code that takes outputs for contiguous
            logger.info("products are not joined: %s", in_one_line(fault))
            _known[model] = []
    return _known[model]


def _pass(model: PreTrainedModel, device: torch.device) -> None:
    with Pool(3) as pool:
        prompt_logits(model, [([0], [1]), ([0, 0], [2])], pool, device)


def _called_with_one(model: PreTrainedModel, device: torch.device) -> list[list[str]]:
    calls: list[tuple[str, str, Tensor, int]] = []

    def note(name: str, unit: str) -> Any:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            for hidden in inputs:  # there is none where the input is given by its keyword
                # One that is changed in place between two layers is not one input.
                calls.append((name, unit, hidden, hidden._version))

        return keep

    hooks = []
    unit = ""
    may_move = _weights_may_move(model)
    for name, module in model.named_modules():
        if not f"{name}.".startswith(f"{unit}."):
            unit = ""
        if module._compiled_call_impl is not None:
            unit = name
        if _is_plain(module) and _can_be_joined([module], "weight", may_move):
            hooks.append(module.register_forward_pre_hook(note(name, unit)))
    try:
        if hooks:
            _pass(model, device)
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[tuple[Any, ...], list[str]] = {}
    called = [name for name, *_ in calls]
    for name, own_unit, hidden, version in calls:
        if called.count(name) == 1:
            has_bias = model.get_submodule(name)._parameters["bias"] is not None
            groups.setdefault((id(hidden), version, own_unit, has_bias), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer that only casts and adapters go around.

    Those of odd widths are left out: products of such are slow.
    """
    kind = type(module)
    while issubclass(kind, Wrapper):
        if kind.__bases__[0] not in (Cast, Lora):
            return False
        kind = kind.wrapped
    is_linear = issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward
    return is_linear and len(stored_parameter(module, "weight")) % _WIDTHS == 0


@contextmanager
def joined(model: nn.Module, groups: Sequence[Sequence[str]]) -> Iterator[None]:
    """Within it, and without gradients, each group of linear layers makes one product.

    Weights that are cast whenever they are used are cast already, into rows of one matrix. Frozen
    weights that need no cast are moved into one, where they stay, with the values that they had. A
    group of which some are neither, or are sharded, is left as it is.
    """
    stored: list[tuple[nn.Module, str, nn.Parameter]] = []
    kinds: list[tuple[nn.Module, type[nn.Module]]] = []
    may_move = _weights_may_move(model)
    try:
        for names in groups:
            modules = [model.get_submodule(name) for name in names]
            adapted = [module for module in modules if isinstance(module, Lora)]
            parts = ((modules, "weight"), (adapted, "lora_A"))
            if not all(_can_be_joined(one, name, may_move) for one, name in parts):
                continue
            for module in modules:
                kinds.append((module, type(module)))
                # mypy does not see that classes are hashable.
                module.__class__ = _joined_class(type(module))  # type: ignore[arg-type]
            _join(modules, "weight", ("product", "number"), stored)
            _join(adapted, "lora_A", ("narrow_product", "narrow_number"), stored)
        yield
    finally:
        for module, name, weight in stored:
            module._parameters[name] = weight
        for module, kind in kinds:
            module.__class__ = kind
            for attribute in ("product", "number", "narrow_product", "narrow_number"):
                module.__dict__.pop(attribute, None)


def _weights_may_move(model: nn.Module) -> bool:
    """Whether frozen weights may be moved: what sharding has gathered is in memory of its own."""
    return not any(isinstance(module, FSDPModule) for module in model.modules())


def _can_be_joined(modules: Sequence[nn.Module], name: str, may_move: bool) -> bool:
    """Whether all modules cast their weight of this name on use, or may have it moved instead.

    What learns is not moved, nor rows that would begin where compiled code reads from copies.
    """
    weights = [stored_parameter(module, name) for module in modules]
    if any(isinstance(weight, DTensor) for weight in weights):
        return False
    if _are_cast(modules, name):
        return True
    return may_move and all(
        not weight.requires_grad
        and weight.dtype == weights[0].dtype
        and weight.is_contiguous()
        and weight.shape[1] * weight.element_size() % _ALIGNED == 0
        for weight in weights
    )


def _are_cast(modules: Sequence[nn.Module], name: str) -> bool:
    """Whether all modules cast their weight of this name whenever they read it."""
    return all(isinstance(getattr(type(module), name, None), property) for module in modules)


def _join(
    modules: Sequence[Any],
    name: str,
    attributes: tuple[str, str],
    stored: list[tuple[nn.Module, str, nn.Parameter]],
) -> None:
    """Gives modules the product of their weights of this name, and their numbers in it, in place.

    What they `stored` is noted.
    """
    if not modules:
        return
    weights = [stored_parameter(module, name) for module in modules]
    if _are_cast(modules, name):
        stored += [(module, name, weight) for module, weight in zip(modules, weights, strict=True)]
        whole = _cast_into_one(modules, name)
    else:
        whole = _moved_into_one(weights)
    biases = [module.bias for module in modules if name == "weight" and module.bias is not None]
    bias = torch.cat(biases) if biases else None
    product = Product(whole, bias, [len(weight) for weight in weights])
    for number, module in enumerate(modules):
        setattr(module, attributes[0], product)
        setattr(module, attributes[1], number)


def _cast_into_one(modules: Sequence[nn.Module], name: str) -> Tensor:
    """A matrix whose rows are the cast weights of modules, which have these as weights then."""
    sizes = [len(stored_parameter(module, name)) for module in modules]
    first: Tensor = getattr(modules[0], name)
    whole = first.new_empty(sum(sizes), first.shape[1])
    for module, part in zip(modules, whole.split(sizes), strict=True):
        part.copy_(getattr(module, name))
        module._parameters[name] = nn.Parameter(part, requires_grad=False)
    return whole


def _moved_into_one(weights: Sequence[nn.Parameter]) -> Tensor:
    """A matrix whose rows these weights are, or become, in place."""
    first = weights[0].detach()
    memory = first.untyped_storage().data_ptr()
    places = accumulate((one.numel() for one in weights), initial=first.storage_offset())
    sizes = [len(weight) for weight in weights]
    if all(
        weight.untyped_storage().data_ptr() == memory and weight.storage_offset() == place
        for weight, place in zip(weights, places, strict=False)
    ):
        return first.as_strided((sum(sizes), first.shape[1]), first.stride())
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole.split(sizes), strict=True):
        weight.data = part
    if whole.is_cuda:
        torch.cuda.empty_cache()  # of pieces that no larger one would fit into
    return whole
