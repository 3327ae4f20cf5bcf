"""Which layers of a model get adapters, and which modules are trained whole beside them: from names and patterns."""

import fnmatch
from collections.abc import Iterable, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lacuna.config import refuse
from lacuna.config.sections import LoraConfig


def find_targets(model: PreTrainedModel, settings: LoraConfig) -> tuple[list[str], ...]:
    """The names of the linear layers and stacks of a whole model that get adapters, and of modules trained whole.

    What is within a module that is trained whole gets none, as with peft; a layer with a single output (a gate) only
    by its name. Raises `UserError` for names that match nothing, and a rank of new adapters that is higher than a
    weight's.
    """
    named = {name: module for name, module in model.named_modules() if name}
    whole = _matching(settings.modules, named, "modules", "module")
    whole = [name for name in whole if not _within(name, {*whole} - {name})]
    layers = {name: module for name, module in named.items() if isinstance(module, nn.Linear | Conv1D)}
    head = model.get_output_embeddings()
    linear = {name: module for name, module in layers.items() if module is not head and not _within(name, whole)}
    every = settings.targets == ("all-linear",)
    targets = _matching(["*"] if every else settings.targets, linear, "targets", "linear layer")
    targets = [name for name in targets if not every or min(linear[name].weight.shape) > 1]
    stacks = {name: weight for name, weight in model.named_parameters() if weight.ndim == 3}
    free = [name for name in stacks if not _within(name, whole)]
    parameters = _matching(settings.parameters, free, "parameters", "stack of weights")
    weights = {name: linear[name].weight for name in targets} | {name: stacks[name] for name in parameters}
    learns = bool(weights) or any([*named[name].parameters()] for name in whole)
    refuse({"lora.targets, lora.parameters, lora.modules: they name nothing that could learn": not learns})
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
    found = {pattern: fnmatch.filter(names, pattern) + fnmatch.filter(names, f"*.{pattern}") for pattern in patterns}
    known = ", ".join(sorted({part for name in names if not (part := name.rpartition(".")[2]).isdecimal()})) or "none"
    refuse({
        f"lora.{setting}: {pattern!r} matches no {kind} of the model: choose of {known}, with patterns or whole names":
            not matches for pattern, matches in found.items()
    })  # fmt: skip
    return [name for name in names if any(name in matches for matches in found.values())]
