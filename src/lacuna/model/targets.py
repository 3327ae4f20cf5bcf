"""Which layers of a model get adapters, and which modules are trained whole beside them: from names and patterns."""

import copy
import fnmatch
import inspect
import re
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lacuna.config import refuse
from lacuna.config.adapters import LoraConfig

_plain: dict[type[nn.Module], bool] = {nn.Linear: True, Conv1D: True}


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that multiplies with its weight, adds its bias, and no more.

    Some of transformers' do more, or less: routers, and products by groups of inputs. One of each
    class is tried.
    """
    kind = type(module)
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    if hasattr(kind, "quantized"):  # which only plain ones are
        return True
    if kind not in _plain:
        _plain[kind] = _computes_plainly(module)
    return _plain[kind]


@torch.no_grad()
def _computes_plainly(module: nn.Module) -> bool:
    tried = copy.deepcopy(module).to("meta").to_empty(device="cpu").float()
    for parameter in tried.parameters():
        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    weight = tried.weight.mT if isinstance(module, Conv1D) else tried.weight
    hidden = torch.linspace(-1, 1, 6 * weight.shape[1]).view(2, 3, -1)
    expected = nn.functional.linear(hidden, weight, tried.bias)
    try:
        output = tried(hidden)
    except (RuntimeError, TypeError, ValueError):  # it wants other inputs
        return False
    same_kind = isinstance(output, Tensor) and output.shape == expected.shape
    return same_kind and torch.allclose(output, expected, rtol=1e-4, atol=1e-4)


def plain_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a model that it uses as such, by name.

    Not those whose weight the code around them reads itself (Mamba's fused kernels do), past
    whatever is beside it or in its place.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if is_plain_linear(module) and not reads_weight(model, name)
    }


def reads_weight(model: nn.Module, name: str) -> bool:
    """Whether the code of the module around reads the weight of the layer of this name itself."""
    place, _, own_name = name.rpartition(".")
    return own_name in _read_weights(type(model.get_submodule(place)))


@cache
def _read_weights(kind: type[nn.Module]) -> set[str]:
    """Of which children the code of a kind of module computes with the weights itself.

    Not where it only asks for their dtype or the like, nor for slices (BLOOM's, of old
    checkpoints).
    """
    own = (one for one in kind.__mro__ if one.__module__.startswith("transformers.models."))
    read = r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size)|\[)"
    return {child for one in own for child in re.findall(read, inspect.getsource(one))}


def find_targets(model: PreTrainedModel, settings: LoraConfig) -> tuple[list[str], ...]:
    """The names of the linear layers and stacks of a whole model that get adapters, and of modules trained whole.

    What is within a module that is trained whole gets none, as with peft; a layer with a single
    output (a gate) only by its name. Raises `UserError` for names that match nothing, and a rank of
    new adapters that is higher than a weight's.
    """
    named = {name: module for name, module in model.named_modules() if name}
    whole = _matching(settings.modules, named, "modules", "module")
    whole = [name for name in whole if not _within(name, {*whole} - {name})]
    layers = plain_linears(model)
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in layers.items()
        if module is not head and not _within(name, whole)
    }
    every = settings.targets == ("all-linear",)
    targets = _matching(["*"] if every else settings.targets, linear, "targets", "linear layer")
    targets = [name for name in targets if not every or min(linear[name].weight.shape) > 1]
    stacks = {name: weight for name, weight in model.named_parameters() if weight.ndim == 3}
    free = [name for name in stacks if not _within(name, whole)]
    parameters = _matching(settings.parameters, free, "parameters", "stack of weights")
    weights = {name: linear[name].weight for name in targets} | {
        name: stacks[name] for name in parameters
    }
    learns = bool(weights) or any([*named[name].parameters()] for name in whole)
    refuse(
        {
            "lora.targets, lora.parameters, lora.modules: they name nothing that could learn": not learns
        }
    )
    ranks = {min(weight.shape[-2:]): name for name, weight in weights.items()}
    size = min(ranks, default=settings.rank)
    low = f"lora.rank: {settings.rank} is more than {size}, the rank of {ranks.get(size)}: lower it, or leave that out"
    refuse({low: settings.rank > size and not settings.adapter})
    return targets, parameters, whole


def _within(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or parameter of this name is one of the `modules`, or in one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _matching(patterns: Sequence[str], names: Iterable[str], setting: str, kind: str) -> list[str]:
    """The names that fit one of the patterns, as a whole or from one of their dots on."""
    found = {
        pattern: fnmatch.filter(names, pattern) + fnmatch.filter(names, f"*.{pattern}")
        for pattern in patterns
    }
    known = (
        ", ".join(
            sorted({part for name in names if not (part := name.rpartition(".")[2]).isdecimal()})
        )
        or "none"
    )
    refuse(
        {
            f"lora.{setting}: {pattern!r} matches no {kind} of the model: choose of {known}, with patterns or whole names": not matches
            for pattern, matches in found.items()
        }
    )
    return [name for name in names if any(name in matches for matches in found.values())]
