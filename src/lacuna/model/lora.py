"""Low-rank adapters: small matrices that learn beside weights which do not (LoRA, arXiv 2106.09685).

The weights are those of linear layers, and stacks of experts': parameters [experts, out, in], or
[experts, in, out] of modules that are `is_transposed`. A stack's adapter is lora_A [experts * rank,
in] and lora_B [out, rank * experts]. A module holds that of its last stack, its child `base_layer`
that of the one before, and so on, as peft's files do.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lacuna.config import explained, refuse
from lacuna.config.adapters import ADAPTER_WEIGHTS, LoraConfig
from lacuna.model.quantization import dense_weight, leave_whole, quantized_modules
from lacuna.model.targets import find_targets
from lacuna.parallel.fsdp import local, own_part

PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")


def _scale(settings: LoraConfig) -> float:
    """What the product of an adapter is multiplied by; rsLoRA (arXiv 2312.03732) keeps it steady over ranks."""
    return settings.alpha / (math.sqrt(settings.rank) if settings.rslora else settings.rank)


def add_adapters(
    model: PreTrainedModel, settings: LoraConfig, dtype: torch.dtype
) -> tuple[list[str], ...]:
    """Freezes a whole model in place but for adapters, which it gets, and modules trained whole, both in `dtype`.

    Adapters are empty. Returns names and raises `UserError` as `find_targets` does.
    """
    targets, parameters, whole = find_targets(model, settings)
    weights = {f"{name}.weight" for name in targets}.union(parameters)
    model.requires_grad_(False)
    for name, module in [*model.named_modules()]:
        own = tuple(part for part in module._parameters if f"{name}.{part}" in weights)
        if name in whole:
            leave_whole(module)
            module.to(dtype).requires_grad_(True)
        elif name in targets:
            module.__class__ = _adapted(type(module), settings)
        elif own:
            module.__class__ = _adapted_stacks(type(module), settings, own)
        holder = module
        for place in reversed(own):
            if place != own[-1]:
                holder.base_layer = nn.Module()
                holder = holder.base_layer
            weight = module._parameters[place]
            *count, out, into = weight.mT.shape if _is_transposed(module) else weight.shape
            width = settings.rank * math.prod(count)
            sizes = ((width, into), (out, width), (out,))
            for part, size in zip(PARTS if settings.dora else PARTS[:2], sizes, strict=False):
                setattr(
                    holder, part, nn.Parameter(torch.empty(size, dtype=dtype, device=weight.device))
                )
    return targets, parameters, whole


def _is_transposed(module: nn.Module) -> bool:
    """Whether a module has its weights as [in, out]."""
    return isinstance(module, Conv1D) or getattr(module, "is_transposed", False)


def _holders(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that have the adapters of a module's weights, by the names of these in it."""
    names = getattr(type(module), "adapted", ())
    inwards = accumulate(names[1:], lambda holder, _: holder.base_layer, initial=module)
    return dict(zip(reversed(names), inwards, strict=False))


@cache
def _adapted(kind: type[nn.Module], adapter: LoraConfig) -> type[nn.Module]:
    """A kind of linear layer that adds what its adapter makes of the input."""

    def forward(module: nn.Module, hidden: Tensor) -> Tensor:
        if not module.adapter_is_on:
            return kind.forward(module, hidden)
        if hasattr(kind, "quantized") and not adapter.dropout:
            return kind.forward(module, hidden, module.lora_A, module.lora_B, _scale(adapter))
        result = kind.forward(module, hidden)
        shown = F.dropout(hidden, adapter.dropout, module.training)
        # Scaled where it is narrow: for the backward pass, a wide product would be kept twice.
        change = F.linear(_scale(adapter) * F.linear(shown, module.lora_A), module.lora_B)
        if not adapter.dora:
            return result + change
        # Also the weight itself sees only what is shown; the lengths of rows are constants (DoRA,
        # section 4.3).
        unbiased = kind.forward(module, shown) if adapter.dropout else result
        if module.bias is not None:
            unbiased = unbiased - module.bias
        factor = module.lora_magnitude_vector / _row_lengths(module).to(hidden.dtype)
        return result + (factor - 1) * unbiased + factor * change

    known = {"adapter": adapter, "adapted": ("weight",), "adapter_is_on": True}
    return type(kind.__name__, (kind,), {"forward": forward} | known)


class _Seen:
    """A module as its own code sees it, with other weights; no code that is compiled may put these into a module."""

    def __init__(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        self.module, self.weights = module, weights

    def __getattr__(self, name: str) -> Any:
        return self.weights[name] if name in self.weights else getattr(self.module, name)


@cache
def _adapted_stacks(
    kind: type[nn.Module], adapter: LoraConfig, names: tuple[str, ...]
) -> type[nn.Module]:
    """A kind of module that computes with what adapters make of its stacks of these names."""

    def forward(module: nn.Module, *inputs: Any, **named: Any) -> Any:
        if not module.adapter_is_on:
            return kind.forward(module, *inputs, **named)
        stacks = (
            (name, getattr(module, name), holder) for name, holder in _holders(module).items()
        )
        changed = {
            name: _changed(module, stack, beside.lora_A, beside.lora_B)
            for name, stack, beside in stacks
        }
        return kind.forward(_Seen(module, changed), *inputs, **named)

    known = {"adapter": adapter, "adapted": names, "adapter_is_on": True}
    return type(kind.__name__, (kind,), {"forward": forward} | known)


def _row_lengths(module: nn.Module) -> Tensor:
    """The float32 lengths of the weights of each output [out], the adapter's change in them."""
    with torch.no_grad():
        weight = _changed(
            module, module.weight.float(), module.lora_A.float(), module.lora_B.float()
        )
        return torch.linalg.vector_norm(weight, dim=0 if isinstance(module, Conv1D) else 1)


def _changed(module: nn.Module, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The `weight` of a module with the product of its adapter in it."""
    if weight.ndim == 3:
        down, up = (
            down.unflatten(0, (len(weight), -1)),
            up.unflatten(1, (-1, len(weight))).permute(2, 0, 1),
        )
    change = _scale(module.adapter) * up @ down
    return weight + (change.mT if _is_transposed(module) else change).to(weight.dtype)


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor of which this rank may have a share only, whole. Every rank that has one must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def merged_tensor(model: nn.Module, name: str) -> Tensor:
    """The tensor `name` of a model, whole; float32 where it is quantised, or an adapter is beside it, which is in it.

    Every rank that has a share of it must call it.
    """
    place, _, part = name.rpartition(".")
    module = model.get_submodule(place)
    # Not by its name in the module, under which a module that casts has it in less precision.
    whole = whole_tensor(
        module._parameters[part] if part in module._parameters else getattr(module, part)
    )
    if part == "weight":
        whole = dense_weight(module, whole)
    if part not in (holders := _holders(module)):
        return whole
    beside = holders[part]._parameters
    down, up, *magnitude = (whole_tensor(beside[part]).float() for part in PARTS if part in beside)
    whole = _changed(module, whole.float(), down, up)
    inward = 0 if isinstance(module, Conv1D) else 1
    for lengths in magnitude:
        whole *= (lengths / torch.linalg.vector_norm(whole, dim=inward)).unsqueeze(inward)
    return whole


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Dequantises a model that is whole, puts its adapters into the weights beside them, and takes them away, in place.

    What changes becomes float32.
    """
    for name, module in (quantized_modules(model) | adapted_modules(model)).items():
        for part in _holders(module) or module._parameters.keys() & {"weight"}:
            setattr(module, part, nn.Parameter(merged_tensor(model, f"{name}.{part}")))
        plain = (
            kind
            for kind in type(module).mro()
            if not hasattr(kind, "adapter") and not hasattr(kind, "quantized")
        )
        module.__class__ = next(plain)
        for part in PARTS:
            module._parameters.pop(part, None)
        module._modules.pop("base_layer", None)
    model.requires_grad_(True)


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have an adapter, by name."""
    return {
        name: module for name, module in model.named_modules() if "lora_A" in module._parameters
    }


def trained_names(model: nn.Module) -> set[str]:
    """The names of the parameters that are not frozen."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Draws adapters that change nothing yet, in place and by their names, so that every layout draws the same."""
    for name, module in adapted_modules(model).items():
        down, up, magnitude = (module._parameters.get(part) for part in PARTS)
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
        bound = 1 / math.sqrt(down.shape[1])  # as nn.Linear's, and peft's
        drawn = torch.empty(down.shape).uniform_(-bound, bound, generator=generator)
        local(down).copy_(own_part(drawn, down))
        local(up).zero_()
        if magnitude is not None:
            # Of the weight alone, which nothing changes yet, and whole: torch 2.11 cannot add to it
            # as it is sharded.
            weight = whole_tensor(module.weight).float()
            lengths = torch.linalg.vector_norm(weight, dim=0 if isinstance(module, Conv1D) else 1)
            local(magnitude).copy_(own_part(lengths, magnitude))


@torch.no_grad()
def initialize_from_quantization_error(
    model: nn.Module, slices: Mapping[str, Any], device: torch.device
) -> None:
    """Has adapters begin as the low-rank part of what quantisation took, in place (LoftQ, arXiv 2310.08659, one round).

    `slices` is what the model's files hold. Where nothing was taken, they stay as they are, since
    zeros never learn.
    """
    for name, module in sorted(adapted_modules(model).items() & quantized_modules(model).items()):
        weight = slices[_alike(f"{name}.weight", slices)][...].to(device).float()
        error = weight - dense_weight(module, weight)
        if not error.any():
            continue
        with torch.random.fork_rng([error.device] if error.is_cuda else []):
            torch.manual_seed(0)
            wide = (error.mT if isinstance(module, Conv1D) else error) / _scale(module.adapter)
            left, sizes, right = torch.svd_lowrank(wide, q=module.adapter.rank, niter=8)
        for factor, parameter in (
            ((right * sizes.sqrt()).mT, module.lora_A),
            (left * sizes.sqrt(), module.lora_B),
        ):
            # Which factors of a product are found is for kernels to say, so that all take those of
            # one rank.
            local(parameter).copy_(own_part(factor, parameter, source=0))


def _alike(name: str, keys: Iterable[str]) -> str:
    """The one of the `keys` that shares most of its end with a name; how they begin differs between files."""
    return max(keys, key=lambda key: len(os.path.commonprefix([key[::-1], name[::-1]])))


def file_name(name: str) -> str:
    """The name that a trained tensor has in peft's file."""
    return f"base_model.model.{name}{'.weight' if name.endswith(PARTS[:2]) else ''}"


@torch.no_grad()
def load_adapters(model: nn.Module, trained: Set[str], settings: LoraConfig) -> None:
    """Fills what a rank has of the parameters `trained` of a whole model, in place, with the sum of the adapters named.

    Raises `UserError` when these are others: of another rank, for other layers, or of another
    model.
    """
    folders, found = settings.adapter, dict[str, list[Tensor]]()
    for folder in folders:
        ratio = (
            _scale(LoraConfig(adapter=(folder,))) / _scale(settings) if len(folders) > 1 else 1.0
        )
        path, mend = os.path.join(folder, ADAPTER_WEIGHTS), "save the adapter again, as safetensors"
        unreadable = explained(
            f"lora.adapter: cannot read {path}", OSError, SafetensorError, mend=mend
        )
        with unreadable, safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(key).float()
                found.setdefault(key, []).append(ratio * tensor if "lora_B" in key else tensor)
    for name, twin in (
        (file_name(end), file_name(home)) for end, home in model.all_tied_weights_keys.items()
    ):
        both = found.pop(name, []), found.get(twin, [])
        same = len(both[0]) == len(both[1]) and all(map(torch.equal, *both))
        refuse(
            {
                f"lora.adapter: {twin} and {name} are one weight in the model, and not the same there": not same
            }
        )
    wrong = (
        f"lora.adapter: {', '.join(folders)} is of another model, or of other settings than lora.*"
    )
    needless = min(found.keys() - {file_name(name) for name in trained}, default=None)
    refuse({f"{wrong}: nothing here takes {needless}": needless is not None})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key, wanted = file_name(name), list(parameter.shape)
            parts = found.get(key, [])
            several = f"lora.adapter: {key} has no sum over several adapters, as only layers' have: give one"
            refuse(
                {
                    several: len(parts) > 1
                    and (bool(settings.parameters) or not name.endswith(PARTS[:2]))
                }
            )
            whole = torch.cat(parts, dim=int(name.endswith("lora_B"))) if parts else None
            shape = "missing" if whole is None else list(whole.shape)
            refuse({f"{wrong}: {key} is {shape}, and {wanted} here": shape != wanted})
            local(parameter).copy_(own_part(whole, parameter))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within it, a model is its base alone: a reference that shares the weights of what is trained.

    Modules that are trained whole stay as they are, and of adapters that began as loftq even that
    beginning is off.
    """
    modules = adapted_modules(model).values()
    for module in modules:
        module.adapter_is_on = False
    try:
        yield
    finally:
        for module in modules:
            del module.adapter_is_on
