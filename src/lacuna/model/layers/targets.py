"""Which layers of a model get adapters, and which modules are trained whole: names and patterns."""

import fnmatch
from collections.abc import Iterable, Sequence

from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.config.adapters import LoraConfig
from lacuna.model.layers.linear import plain_linears


def find_targets(
    model: PreTrainedModel, settings: LoraConfig
) -> tuple[list[str], list[str], list[str]]:
    """The names of the linear layers and of the stacks that get adapters, and of whole modules.

    The last are those that are trained whole; what is within them gets no adapter, as with peft. A
    layer with a single output (a gate) gets one only by its name. Raises `UserError` for names that
    match nothing, and for a rank of new adapters that is higher than a weight's.
    """
    named = {name: module for name, module in model.named_modules() if name}
    whole = _matching_names(settings.modules, named, "modules", "module")
    whole = [name for name in whole if not _is_within(name, {*whole} - {name})]
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in plain_linears(model).items()
        if module is not head and not _is_within(name, whole)
    }
    every = settings.targets == ("all-linear",)
    targets = _matching_names(
        ["*"] if every else settings.targets, linear, "targets", "linear layer"
    )
    if every:
        targets = [name for name in targets if min(linear[name].weight.shape) > 1]
    stacks = {name: weight for name, weight in model.named_parameters() if weight.ndim == 3}
    free = [name for name in stacks if not _is_within(name, whole)]
    parameters = _matching_names(settings.parameters, free, "parameters", "stack of weights")
    weights = {name: linear[name].weight for name in targets}
    weights |= {name: stacks[name] for name in parameters}
    if not weights and not any([*named[name].parameters()] for name in whole):
        raise UserError(
            "lora.targets, lora.parameters, lora.modules: they name nothing that could learn."
        )
    ranks = {min(weight.shape[-2:]): name for name, weight in weights.items()}
    lowest = min(ranks, default=settings.rank)
    if settings.rank > lowest and not settings.adapter:
        raise UserError(
            f"lora.rank: {settings.rank} is more than {lowest}, the rank of {ranks[lowest]}: lower "
            "it, or leave that out."
        )
    return targets, parameters, whole


def _is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or parameter of this name is one of the `modules`, or in one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def names_matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that a pattern matches, as a whole or from one of their dots on."""
    return fnmatch.filter(names, pattern) + fnmatch.filter(names, f"*.{pattern}")


def _matching_names(
    patterns: Sequence[str], names: Iterable[str], setting: str, kind: str
) -> list[str]:
    """The names that one of the patterns matches.

    Raises `UserError` for a pattern that matches none.
    """
    matching: set[str] = set()
    for pattern in patterns:
        found = names_matching(names, pattern)
        if not found:
            ends = {name.rpartition(".")[2] for name in names}
            known = ", ".join(sorted(end for end in ends if not end.isdecimal())) or "none"
            raise UserError(
                f"lora.{setting}: {pattern!r} matches no {kind} of the model: choose of {known}, "
                "with patterns or whole names."
            )
        matching.update(found)
    return [name for name in names if name in matching]
