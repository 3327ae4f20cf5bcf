"""Quantised models in files: which of them can be read, and how their weights are packed."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from lacuna.config import UserError
from lacuna.model.layers.bits import join_packed, quantize
from lacuna.model.layers.quantized import quantized_modules
from lacuna.model.layers.quantized_stacks import quantized_stacks
from lacuna.model.layers.wrapping import stored_parameter
from lacuna.model.leftovers import names_in_model
from lacuna.parallel.fsdp import local, own_part


def take_off_quantization(model_config: PretrainedConfig, asked: str) -> list[str]:
    """Removes the description of quantised files from a model's configuration, in place.

    It is removed because what lacuna writes is not quantised. Returns the names of the modules that
    the files leave unquantised; none for a model whose files are not quantised. Raises `UserError`
    for files that cannot be read, or that are quantised otherwise than `asked`.
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
    """A weight in a model's files that is packed when it is read; used like safetensors' slices."""

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
            packed = join_packed(*parts)
        else:
            packed = quantize(self.slices[self.key][...].to(self.device), self.form)
        return packed.view(torch.float32)[place]


def stored_parts(slices: Mapping[str, Any], key: str) -> list[Tensor]:
    """The parts of a weight that files have quantised, in the order of packing; none for others."""
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
    """The weights in files that a model stores packed, by their names there.

    They are packed on `device` when they are read.
    """
    packed = {
        _name_from_layer(f"{name}.weight"): layer
        for name, layer in quantized_modules(model).items()
        if layer.packed_names
    }
    found = {}
    for key in slices:
        layer = packed.get(_name_from_layer(key))
        if layer is not None:
            found[key] = PackedSlice(slices, key, layer.form, layer.weight, device)
    return found


@torch.no_grad()
def load_stacks(
    model: nn.Module,
    shadow: PreTrainedModel,
    slices: dict[str, Any],
    placing: LoadStateDictConfig,
    home: torch.device,
    device: torch.device,
) -> set[str]:
    """Loads the stacks of experts that a model stores packed, in place, and returns their names.

    Files may have each expert by itself. transformers' loader makes a stack of them in `shadow`,
    one at a time, and what this rank stores of it is packed on `device`. What was read is taken off
    `slices`. Raises `UserError` for experts that files have quantised.
    """
    keys: dict[str, list[str]] = {}
    for key, name in names_in_model(slices, shadow).items():
        keys.setdefault(name, []).append(key)
    loaded = set()
    for path, module in quantized_stacks(model).items():
        packed = module.packed_names
        if packed:
            module.to_empty(device=home, recurse=False)
        for name in packed:
            own_keys = keys.get(f"{path}.{name}", [])
            _require_unquantised(own_keys, slices)
            found = {key: slices.pop(key) for key in own_keys}
            convert_and_load_state_dict_in_model(shadow, found, placing)
            like = shadow.get_submodule(path)
            whole = stored_parameter(like, name)
            if whole.is_meta:
                continue  # what loads all other weights finds that it lacks this one
            stored = stored_parameter(module, name)
            own = own_part(torch.arange(len(whole)), stored).to(whole.device)
            local(stored).copy_(module.stored_weight(name, whole[own].to(device)))
            # Not by `setattr`, in which hooks would give it memory.
            like._parameters[name] = nn.Parameter(whole.to("meta"), requires_grad=False)
            loaded.add(f"{path}.{name}")
    return loaded


def _require_unquantised(keys: Sequence[str], slices: Mapping[str, Any]) -> None:
    """Raises `UserError` where one of the tensors under these keys is quantised."""
    for key in keys:
        if stored_parts(slices, key) or slices[key].get_dtype() in ("U8", "I8"):
            raise UserError(
                f"model.name_or_path: {key} is quantised, and experts that files have quantised do "
                "not make stacks: give the model that they were made from; quantization.base "
                "quantises it."
            )


def _name_from_layer(key: str) -> str:
    """The end of a tensor's name, from the number of its layer on.

    What precedes that differs between files and model.
    """
    tails = re.findall(r"\d+\..*|[^.]+\.[^.]+$", key)
    return tails[0] if tails else ""
