"""Weights in a model's files that the model has no use for, or that it would drop."""

from collections.abc import Iterable, Mapping
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

from lacuna.config import UserError

_ROWS = 4096  # of two embeddings, compared at a time


def check_files(slices: Mapping[str, Any], shadow: PreTrainedModel, files: str) -> None:
    """Raises `UserError` where the model would drop what the `files` have.

    `slices` are the tensors of the files, `shadow` is the whole model without memory.
    """
    key_of = {name: key for key, name in _names_in_model(slices, shadow).items()}
    for pair in shadow.all_tied_weights_keys.items():
        stored = [slices[key_of[name]] for name in pair if name in key_of]
        if len(stored) == 2 and not _are_equal(stored, len(shadow.get_parameter(pair[1]))):
            raise untied(files, pair)


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


def _names_in_model(keys: Iterable[str], shadow: PreTrainedModel) -> dict[str, str]:
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
