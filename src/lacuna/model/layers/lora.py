"""Low-rank adapters: small matrices that learn beside frozen weights (LoRA, arXiv 2106.09685).

The adapters of linear layers are here; `stacks` has those of experts, and `dora` another kind.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.config.adapters import LoraConfig
from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.targets import find_targets
from lacuna.model.layers.wrapping import (
    Place,
    Wrapper,
    stored_parameter,
    unwrap,
    whole_tensor,
    wrap,
)
from lacuna.parallel.fsdp import local, own_part

# The names that adapters' tensors have in their modules, and in peft's files.
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")


def scale_of(settings: LoraConfig) -> float:
    """The number that the product of an adapter's factors is multiplied by.

    That of rsLoRA (arXiv 2312.03732) keeps the change of the output steady over ranks.
    """
    if settings.rslora:
        return settings.alpha / math.sqrt(settings.rank)
    return settings.alpha / settings.rank


class Adapter(Wrapper):
    """What all kinds of adapters have in common.

    Attributes:
        adapter_scale: the number that the product of `lora_B` and `lora_A` is multiplied by; 0
            within `without_adapters`.
    """

    place = Place.ADAPTER
    added_names = (*PARTS, "base_layer")
    adapter_scale: float
    lora_A: Tensor
    lora_B: Tensor


class Lora(Adapter):
    """A linear layer that adds its adapter's output to its own.

    Attributes:
        adapter_dropout: the share of the inputs that is dropped before the adapter.
    """

    adapter_dropout: float
    weight: Tensor
    bias: Tensor | None

    def add_parts(self, rank: int, dtype: torch.dtype) -> None:
        """Gives the layer the tensors of its adapter, empty, in place."""
        weight = self.weight.mT if is_transposed(self) else self.weight
        add_factors(self, rank, weight, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """The sum of the layer's output and the adapter's."""
        if self.takes_adapter and not self.adapter_dropout:
            result: Tensor = super().forward(hidden, self.lora_A, self.lora_B, self.adapter_scale)
        else:
            shown = F.dropout(hidden, self.adapter_dropout, self.training)
            result = super().forward(hidden) + self.adapter_output(shown)
        return result

    def adapter_output(self, shown: Tensor) -> Tensor:
        """The adapter's output."""
        # The narrow product is scaled: a scaled wide one would be kept twice for the backward pass.
        return F.linear(self.adapter_scale * F.linear(shown, self.lora_A), self.lora_B)

    def plain_weight(self, name: str) -> Tensor:
        """The weight with the adapter merged into it."""
        whole = super().plain_weight(name)
        if name != "weight":
            return whole
        down, up = (whole_tensor(stored_parameter(self, part)).float() for part in PARTS[:2])
        return self.merged(whole.float(), down, up)

    def merged(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """A `weight` with the scaled product of these factors added to it."""
        change = self.adapter_scale * up @ down
        return weight + (change.mT if is_transposed(self) else change).to(weight.dtype)

    def initialize_from_weight(self) -> None:
        """Initialises the parts of the adapter that depend on the weight, in place: none here."""


def add_factors(holder: nn.Module, width: int, weight: Tensor, dtype: torch.dtype) -> None:
    """Gives a module, in place, empty adapter factors of this width for a `weight` [out, in]."""
    out, into = weight.shape[-2:]
    for part, size in zip(PARTS, ((width, into), (out, width)), strict=False):
        empty = torch.empty(size, dtype=dtype, device=weight.device)
        holder.register_parameter(part, nn.Parameter(empty))


def add_adapters(
    model: PreTrainedModel, settings: LoraConfig, dtype: torch.dtype
) -> tuple[list[str], list[str], list[str]]:
    """Gives a model empty adapters, in place, and freezes all but them and modules trained whole.

    The adapters and the modules that are trained whole get this dtype. Returns names, and raises
    `UserError`, as `find_targets` does.
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
        adapted = wrap(layer, wrapper, adapter_scale=scale, adapter_dropout=settings.dropout)
        adapted.add_parts(settings.rank, dtype)
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
    """Initialises adapters, in place, so that they change nothing yet.

    The random numbers depend on the adapters' names, so that they are the same in every layout.
    """
    for name, module in adapted_modules(model).items():
        down, up = (stored_parameter(module, part) for part in PARTS[:2])
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
        bound = 1 / math.sqrt(down.shape[1])  # as nn.Linear's, and peft's
        drawn = torch.empty(down.shape).uniform_(-bound, bound, generator=generator)
        local(down).copy_(own_part(drawn, down))
        local(up).zero_()
        if isinstance(module, Lora):
            module.initialize_from_weight()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within it, a model computes as its base does: a reference that shares the trained weights.

    Modules that are trained whole stay as they are. Adapters that loftq initialised are off with
    what they began as. Adapters are multiplied by 0, and not left out: compiled layers would be
    others then, which round in other places than those of the model that is compared with this one.
    """
    modules = [module for module in model.modules() if isinstance(module, Adapter)]
    for module in modules:
        module.adapter_scale = 0.0
    try:
        yield
    finally:
        for module in modules:
            del module.adapter_scale  # that of its class is left
