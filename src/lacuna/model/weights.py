"""Hugging Face safetensors, read straight into the shards of a model on the meta device."""

import json
import os
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from lacuna.config import UserError
from lacuna.model.initialize import tie_weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_folder(source: str) -> str:
    """The local folder with the weights of `source`, a folder or a Hub id (downloaded to the Hub's cache).

    Raises `UserError` when there is none.
    """
    if os.path.isdir(source):
        return source
    try:
        return snapshot_download(source, allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"])
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise UserError(f"model.name_or_path: no folder {source!r}, and the Hub did not give it: {error}") from error


def safetensors_files(folder: str) -> list[str]:
    """The weight files of an HF folder. Raises `UserError` when a file is missing."""
    index = os.path.join(folder, INDEX)
    if os.path.exists(index):
        with open(index) as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    else:
        names = [SINGLE]
    paths = [os.path.join(folder, name) for name in names]
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise UserError(f"model.name_or_path: {folder!r} lacks the weight file {os.path.basename(missing[0])}.")
    return paths


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
    settings = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(shadow), dtype=dtype, device_map={"": device}
    )
    info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    missing = sorted(info.missing_keys - set(model.all_tied_weights_keys))
    if missing or info.mismatched_keys or info.conversion_errors:
        problem = f"lacks {missing[:3]}" if missing else f"does not fit: {sorted(info.mismatched_keys)[:3]}"
        raise UserError(f"model.name_or_path: the checkpoint in {folder!r} {problem} {info.conversion_errors or ''}")
    tie_weights(model)
    return expected - info.missing_keys
