"""Hugging Face safetensors, read straight into the shards of a model on the meta device."""

import json
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from lacuna.config import UserError, refuse
from lacuna.model.architecture import vocabulary_weights
from lacuna.model.initialize import tie_weights

_BLOCK = 4096  # rows read at once for their mean


def weight_files(source: str) -> list[Path]:
    """The safetensors files of `source`, a folder or a Hub id (downloaded to the Hub's cache).

    Raises `UserError` when there is no such thing, or a file is missing.
    """
    kinds = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    try:
        folder = Path(source if os.path.isdir(source) else snapshot_download(source, allow_patterns=kinds))
    except (OSError, ValueError) as error:
        raise UserError(f"model.name_or_path: no folder {source!r}, and the Hub did not give it: {error}") from error
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {SAFE_WEIGHTS_NAME}
    lacks = f"model.name_or_path: {source!r} lacks the weight file"
    refuse({f"{lacks} {name}": not (folder / name).exists() for name in sorted(names)})
    return [folder / name for name in sorted(names)]


@dataclass(frozen=True)
class _Grown:
    """A slice of a safetensors file, for transformers' loader, with `rows` rows.

    Those of the ids `added` and those that the file lacks are the mean of the first `known`, which only a rank whose
    share has such a row reads, a block at a time.
    """

    stored: Any
    rows: int
    known: int
    added: Set[int]

    def get_shape(self) -> list[int]:
        return [self.rows, *self.stored.get_shape()[1:]]

    def __getitem__(self, index: Any) -> Tensor:
        rows, *others = (slice(None),) if index is ... else index
        first, last, _ = rows.indices(self.rows)
        size = self.stored.get_shape()[0]
        read = self.stored[(slice(min(first, size), min(last, size)), *others)]
        new = [row - first for row in range(first, last) if row >= size or row in self.added]
        if new:
            read = torch.cat([read, read.new_empty(last - first - len(read), *read.shape[1:])])
            known = min(self.known, size)
            blocks = (slice(start, min(start + _BLOCK, known)) for start in range(0, known, _BLOCK))
            total = sum(self.stored[(block, *others)].double().sum(0) for block in blocks)
            read[new] = (total / known).to(read.dtype)
        return read


def load_weights(
    model: PreTrainedModel, shadow: PreTrainedModel, source: str, device: torch.device, dtype: torch.dtype,
    grow: tuple[int, Set[int]] | None = None,
) -> None:  # fmt: skip
    """Loads the weights of `source` into the sharded meta `model`; each rank reads only the slices it holds.

    To `grow` the vocabulary, give how many ids the tokenizer knew and which it got: their rows, and all that the files
    lack, become the mean of the rows that it knew.

    transformers' own loader renames and fuses what its model classes store otherwise than the Hub does; it finds its
    rules by class, which sharding changes, hence `shadow`, the same model unsharded. Raises `UserError` when the files
    do not fit the model.
    """
    files = [safe_open(path, framework="pt") for path in weight_files(source)]
    slices: dict[str, Any] = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118
    if grow is not None:
        rows = shadow.config.get_text_config().vocab_size
        ends = {tuple(name.split(".")[-2:]) for name in vocabulary_weights(shadow)}  # what precedes may differ
        slices |= {
            key: _Grown(stored, rows, *grow) for key, stored in slices.items() if tuple(key.split(".")[-2:]) in ends
        }
    mapping = get_model_conversion_mapping(shadow)
    settings = LoadStateDictConfig(weight_mapping=mapping, dtype=dtype, device_map={"": device})
    info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    missing = sorted(info.missing_keys - set(model.all_tied_weights_keys))
    if missing or info.mismatched_keys or info.conversion_errors:
        problem = f"lacks {missing[:3]}" if missing else f"does not fit: {sorted(info.mismatched_keys)[:3]}"
        raise UserError(f"model.name_or_path: the checkpoint in {source!r} {problem} {info.conversion_errors or ''}")
    tie_weights(model)
