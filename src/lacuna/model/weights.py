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

from lacuna.config import UserError, refuse
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


def load_weights(
    model: PreTrainedModel, shadow: PreTrainedModel, source: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Loads the weights of `source` into the sharded meta `model`; each rank reads only the slices it holds.

    transformers' own loader renames and fuses what its model classes store otherwise than the Hub does; it finds its
    rules by class, which sharding changes, hence `shadow`, the same model unsharded. Raises `UserError` when the files
    do not fit the model.
    """
    files = [safe_open(path, framework="pt") for path in weight_files(source)]
    slices: dict[str, Any] = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118
    mapping = get_model_conversion_mapping(shadow)
    settings = LoadStateDictConfig(weight_mapping=mapping, dtype=dtype, device_map={"": device})
    info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    missing = sorted(info.missing_keys - set(model.all_tied_weights_keys))
    if missing or info.mismatched_keys or info.conversion_errors:
        problem = f"lacks {missing[:3]}" if missing else f"does not fit: {sorted(info.mismatched_keys)[:3]}"
        raise UserError(f"model.name_or_path: the checkpoint in {source!r} {problem} {info.conversion_errors or ''}")
    tie_weights(model)
