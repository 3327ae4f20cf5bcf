"""Quantised models in files: which can be read, and how their weights become packed ones."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from lacuna.config import UserError
from lacuna.model.layers.bits import joined, quantize
from lacuna.model.layers.quantized import quantized_modules


def take_off_quantization(model_config: PretrainedConfig, asked: str) -> list[str]:
    """The modules that the files of a quantised model leave as they were; none for other models.

    Takes the description of that off the configuration, since what lacuna writes is not quantised.
    Raises `UserError` for files that cannot be read, or are quantised otherwise than `asked`.
    """
    theirs = model_config.__dict__.pop("quantization_config", None) or {}
    if not theirs:
        return []
    form = None
    if theirs.get("load_in_8bit"):
        form = "int8"
    elif theirs.get("load_in_4bit") and theirs.get("bnb_4bit_quant_type") == "nf4":
        form = "nf4" if theirs.get("bnb_4bit_use_double_quant") else None
    quantised = f"model.name_or_path: its weights are quantised by {theirs.get('quant_method')}"
    if form is None or model_config.model_type == "gpt2":  # which is stored transposed
        raise UserError(
            f"{quantised}: only bitsandbytes' int8, and nf4 with double quantisation, can be read."
        )
    if form != asked:
        raise UserError(f"{quantised} as {form}, quantization.base is {asked}: set it to {form}.")
    return theirs.get("llm_int8_skip_modules") or []


@dataclass(frozen=True)
class PackedSlice:
    """A weight among a model's files, packed when it is read, like a slice of safetensors'."""

    slices: Mapping[str, Any]
    key: str
    form: str
    like: Tensor
    device: torch.device

    def get_shape(self) -> list[int]:
        """The shape of the packed weight."""
        return [*self.like.shape]

    def __getitem__(self, place: Any) -> Tensor:
        parts = stored_parts(self.slices, self.key)
        if parts:
            packed = joined(*parts)
        else:
            packed = quantize(self.slices[self.key][...].to(self.device), self.form)
        return packed.view(torch.float32)[place]


def stored_parts(slices: Mapping[str, Any], key: str) -> list[Tensor]:
    """Of a weight that bitsandbytes has quantised in files, the parts in the order of packing."""
    scales = f"{key.removesuffix('weight')}SCB"
    if scales in slices:
        return [slices[scales][...], slices[key][...]]
    state = f"{key}.quant_state.bitsandbytes__nf4"
    if state in slices:
        offset = torch.tensor([json.loads(bytes(slices[state][...].tolist()))["nested_offset"]])
        groups = slices[f"{key}.nested_absmax"][...]
        return [groups, offset, slices[f"{key}.absmax"][...], slices[key][...]]
    return []


def packed_slices(
    model: nn.Module, slices: Mapping[str, Any], device: torch.device
) -> dict[str, PackedSlice]:
    """What stands in files for the packed weights of a model, by their names there.

    It is computed on `device`.
    """
    packed = {
        _tail(f"{name}.weight"): (layer.form, layer.weight)
        for name, layer in quantized_modules(model).items()
        if layer.is_packed
    }
    return {
        key: PackedSlice(slices, key, *packed[_tail(key)], device)
        for key in slices
        if _tail(key) in packed
    }


def _tail(key: str) -> str:
    """What a tensor's name ends with, from the number of its layer on.

    What precedes that differs between files.
    """
    return re.search(r"\d+\..*|[^.]+\.[^.]+$|$", key)[0]
