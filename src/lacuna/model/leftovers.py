"""Weights in a model's files that the model has no use for, or that it would drop."""

import re
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from lacuna.config import UserError, logger
from lacuna.model.kind import is_scoring

_ROWS = 4096  # of two embeddings, compared at a time
# Buffers of older versions of transformers, and what bitsandbytes keeps beside a packed weight.
_NO_WEIGHT = re.compile(r"\.(inv_freq|masked_bias|SCB|weight_format|weight\..+)$")
_IN_LIST = re.compile(r"(.*?)\.(\d+)\.")  # the list of layers, and which of them


def check_files(slices: Mapping[str, Any], shadow: PreTrainedModel, files: str) -> None:
    """Raises `UserError` where the model would drop what the `files` have, or warns of it.

    `slices` are the tensors of the files, `shadow` is the whole model without memory.
    """
    key_of = {name: key for key, name in names_in_model(slices, shadow).items()}
    for pair in shadow.all_tied_weights_keys.items():
        stored = [slices[key_of[name]] for name in pair if name in key_of]
        if len(stored) == 2 and not _are_equal(stored, len(shadow.get_parameter(pair[1]))):
            raise untied(files, pair)
    found = SimpleNamespace(missing_keys=set(), unexpected_keys=key_of.keys() - shadow.state_dict())
    shadow._adjust_missing_and_unexpected_keys(found)  # type: ignore[arg-type]
    check_unused(found.unexpected_keys, shadow, files)


def check_unused(names: Iterable[str], model: PreTrainedModel, files: str) -> None:
    """Raises `UserError` where weights without a use are layers that the model does not have.

    Warns of all others but those that are known to be of no use: buffers, the parts of packed
    weights, layers that predict further tokens, and the head that one that scores does not have.
    """
    buffers = {name for name, _ in model.named_buffers()}
    unused = [name for name in names if name not in buffers and not _NO_WEIGHT.search(name)]
    if is_scoring(model.config):
        unused = [name for name in unused if name.startswith(f"{model.base_model_prefix}.")]
    further = {_layer_of(name) for name in unused if ".eh_proj." in name}
    unused = sorted(name for name in unused if _layer_of(name) not in further - {None})
    last: dict[str, int] = {}
    for layers, number in filter(None, map(_layer_of, model.state_dict())):
        last[layers] = max(number, last.get(layers, 0))
    for layers, number in filter(None, map(_layer_of, unused)):
        if number > last.get(layers, number):
            raise UserError(
                f"{files}: {layers}.{number} is in the files, but by the configuration "
                f"{layers}.{last[layers]} is the last: correct num_hidden_layers in config.json; "
                "if only the first layers are wanted, write them alone, by transformers' "
                "from_pretrained and save_pretrained."
            )
    if unused:
        some = ", ".join(unused[:3])
        told = "%s: has %d weights that the model has no use for: %s"
        logger.warning(told, files, len(unused), f"{some}, …" if unused[3:] else some)


def _layer_of(name: str) -> tuple[str, int] | None:
    """The list of layers that a weight is in, and the number of its layer; None for others."""
    found = _IN_LIST.match(name)
    return (found[1], int(found[2])) if found else None


def untied(files: str, pair: Iterable[str]) -> UserError:
    """What to raise where two weights that are to be one differ in the files."""
    return UserError(
        f"{files}: {' and '.join(pair)} differ, but the configuration says that they are one "
        "weight: set tie_word_embeddings to false in config.json."
    )


def _are_equal(stored: Iterable[Any], rows: int) -> bool:
    """Whether two tensors in files, of so many rows, are equal."""
    for start in range(0, rows, _ROWS):
        first, second = (one[start : start + _ROWS].float() for one in stored)
        if not torch.equal(first, second):
            return False
    return True


def names_in_model(keys: Iterable[str], shadow: PreTrainedModel) -> dict[str, str]:
    """The name that each tensor of a model's files gets in the model, as transformers renames."""
    mapping = get_model_conversion_mapping(shadow)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    prefix = shadow.base_model_prefix
    known = shadow.state_dict()
    names = {}
    for key in sorted(keys, key=dot_natural_key):
        names[key], _ = rename_source_key(key, renamings, converters, prefix, known)
        if names[key] not in known and key in known:
            names[key] = key
    return names
