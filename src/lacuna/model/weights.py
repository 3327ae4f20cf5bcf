"""Hugging Face safetensors, read straight into the shards of a model on the meta device."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from lacuna.config import UserError
from lacuna.model.initialize import tie_weights


def weight_folder(source: str) -> str:
    """The local folder with the weights of `source`, a folder or a Hub id (downloaded to the Hub's cache).

    Raises `UserError` when there is none.
    """
    if os.path.isdir(source):
        return source
    try:
        return snapshot_download(source, allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"])
    except (OSError, ValueError) as error:
        raise UserError(f"model.name_or_path: no folder {source!r}, and the Hub did not give it: {error}") from error


def safetensors_files(folder: str) -> list[str]:
    """The weight files of an HF folder. Raises `UserError` when a file is missing."""
    index = Path(folder, SAFE_WEIGHTS_INDEX_NAME)
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {SAFE_WEIGHTS_NAME}
    for name in sorted(names):
        if not os.path.exists(os.path.join(folder, name)):
            raise UserError(f"model.name_or_path: {folder!r} lacks the weight file {name}.")
    return [os.path.join(folder, name) for name in sorted(names)]


def load_weights(
    model: PreTrainedModel, shadow: PreTrainedModel, folder: str, device: torch.device, dtype: torch.dtype
) -> set[str]:
    """Loads the weights in `folder` into the sharded meta `model`; each rank reads only the slices it holds.

    transformers' own loader renames and fuses what its model classes store otherwise than the Hub does; it finds its
    rules by class, which sharding changes, hence `shadow`, the same model unsharded. Returns the names it filled.
    Raises `UserError` when the files do not fit the model.
    """
    files = [safe_open(path, framework="pt") for path in safetensors_files(folder)]
    slices: dict[str, Any] = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118
    expected = set(model.state_dict())
    mapping = get_model_conversion_mapping(shadow)
    settings = LoadStateDictConfig(weight_mapping=mapping, dtype=dtype, device_map={"": device})
    info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    missing = sorted(info.missing_keys - set(model.all_tied_weights_keys))
    if missing or info.mismatched_keys or info.conversion_errors:
        problem = f"lacks {missing[:3]}" if missing else f"does not fit: {sorted(info.mismatched_keys)[:3]}"
        raise UserError(f"model.name_or_path: the checkpoint in {folder!r} {problem} {info.conversion_errors or ''}")
    tie_weights(model)
    return expected - info.missing_keys
