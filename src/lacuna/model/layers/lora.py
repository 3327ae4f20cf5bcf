"""Low-rank adapters: small matrices that learn beside weights which do not (LoRA, arXiv 2106.09685).

Those of linear layers are here; `stacks` has those of experts, and `dora` a kind of its own.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.config.sections import LoraConfig
from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.targets import find_targets
from lacuna.model.layers.wrapping import Place, Wrapper, unwrap, whole_tensor, wrap
from lacuna.parallel.fsdp import local, own_part

# The names that adapters' tensors have in their modules, and in peft's files.
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")


def scale_of(settings: LoraConfig) -> float:
    """What the product of an adapter is multiplied by.

    rsLoRA (arXiv 2312.03732) keeps it steady over ranks.
    """
    return settings.alpha / (math.sqrt(settings.rank) if settings.rslora else settings.rank)


class Adapter(Wrapper):
    """What all kinds of adapters have in common.

    Attributes:
        adapter_scale: what the product of `lora_A` and `lora_B` is multiplied by.
        adapter_is_on: whether it counts; else the module computes what it would without it.
    """

    place = Place.ADAPTER
    brought = (*PARTS, "base_layer")
    adapter_scale: float
    adapter_is_on = True
    lora_A: Tensor
    lora_B: Tensor


class Lora(Adapter):
    """A linear layer that adds what its adapter makes of the input.

    Attributes:
        adapter_dropout: the share of the inputs that the adapter is not shown.
    """

    adapter_dropout: float

    def add_parts(self, rank: int, dtype: torch.dtype) -> None:
        """Gives the layer the tensors of its adapter, empty, in place."""
        weight = self.weight.mT if is_transposed(self) else self.weight
        add_factors(self, rank, weight, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output and the adapter's."""
        if not self.adapter_is_on:
            return super().forward(hidden)
        if self.takes_adapter and not self.adapter_dropout:
            return super().forward(hidden, self.lora_A, self.lora_B, self.adapter_scale)
        shown = F.dropout(hidden, self.adapter_dropout, self.training)
        return super().forward(hidden) + self.change(shown)

    def change(self, shown: Tensor) -> Tensor:
        """What the adapter makes of the inputs."""
        # Scaled where it is narrow: for the backward pass, a wide product would be kept twice.
        return F.linear(self.adapter_scale * F.linear(shown, self.lora_A), self.lora_B)

    def plain_weight(self, name: str) -> Tensor:
        """The weight with the adapter in it."""
        whole = super().plain_weight(name)
        if name != "weight":
            return whole
        down, up = (whole_tensor(self._parameters[part]).float() for part in PARTS[:2])
        return self.changed(whole.float(), down, up)

    def changed(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """A `weight` with the product of these factors in it."""
        change = self.adapter_scale * up @ down
        return weight + (change.mT if is_transposed(self) else change).to(weight.dtype)


def add_factors(holder: nn.Module, width: int, weight: Tensor, dtype: torch.dtype) -> None:
    """Gives a module, in place, empty factors of this width for a `weight` [out, in]."""
    out, into = weight.shape[-2:]
    for part, size in zip(PARTS, ((width, into), (out, width)), strict=False):
        empty = torch.empty(size, dtype=dtype, device=weight.device)
        holder.register_parameter(part, nn.Parameter(empty))


def add_adapters(
    model: PreTrainedModel, settings: LoraConfig, dtype: torch.dtype
) -> tuple[list[str], list[str], list[str]]:
    """Freezes a whole model, in place, but for adapters, which it gets, and modules trained whole.

    These and the adapters, which are empty, have this dtype. Returns names and raises `UserError`
    as `find_targets` does.
    """
    targets, parameters, whole = find_targets(model, settings)
    model.requires_grad_(False)
    for name in whole:
        trained = model.get_submodule(name)
        for module in trained.modules():
            unwrap(module)  # what is quantised does not learn
        trained.to(dtype).requires_grad_(True)
    wrapper: type[Lora] = Lora
    if settings.dora:
        from lacuna.model.layers.dora import Dora

        wrapper = Dora
    scale = scale_of(settings)
    for name in targets:
        layer = model.get_submodule(name)
        wrap(layer, wrapper, adapter_scale=scale, adapter_dropout=settings.dropout)
        layer.add_parts(settings.rank, dtype)
    if parameters:
        from lacuna.model.layers.stacks import add_stack_adapters

        add_stack_adapters(model, parameters, settings.rank, scale, dtype)
    return targets, parameters, whole


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have the tensors of an adapter, by name."""
    return {
        name: module for name, module in model.named_modules() if "lora_A" in module._parameters
    }


def trained_names(model: nn.Module) -> set[str]:
    """The names of the parameters that are not frozen."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Draws adapters that change nothing yet, in place.

    They are drawn by their names, so that every layout draws the same.
    """
    for name, module in adapted_modules(model).items():
        down, up = (module._parameters[part] for part in PARTS[:2])
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
        bound = 1 / math.sqrt(down.shape[1])  # as nn.Linear's, and peft's
        drawn = torch.empty(down.shape).uniform_(-bound, bound, generator=generator)
        local(down).copy_(own_part(drawn, down))
        local(up).zero_()
        if "lora_magnitude_vector" in module._parameters:
            module.measure()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within it, a model is its base alone: a reference that shares the weights of what is trained.

    Modules that are trained whole stay as they are, and of adapters that began as loftq even that
    beginning is off.
    """
    modules = [module for module in model.modules() if isinstance(module, Adapter)]
    for module in modules:
        module.adapter_is_on = False
    try:
        yield
    finally:
        for module in modules:
            del module.adapter_is_on
