"""What fills a sharded meta model: Hugging Face safetensors, or fresh weights, and its buffers."""

import json
import os
import re
from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    WeightConverter,
    convert_and_load_state_dict_in_model,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from lacuna.config import Config, UserError, explained
from lacuna.config.sections import ModelConfig
from lacuna.data.gguf import hf_folder
from lacuna.data.tokenizer import added_ids
from lacuna.model.architecture import meta_model, stored_tensors, vocabulary_weights
from lacuna.model.initial import draw_weights, place_buffers
from lacuna.model.layers.lora import PARTS, adapted_modules
from lacuna.model.layers.wrapping import wrapped_modules
from lacuna.parallel.fsdp import local, own_part
from lacuna.parallel.precision import stored_dtype


def fill_model(
    model: PreTrainedModel, trained: Set[str], config: Config, device: torch.device, fill: bool
) -> None:
    """Gives a sharded meta model its memory, its buffers, and with `fill` its weights.

    Offloaded weights stay on the CPU. All parameters are frozen but those `trained`.
    """
    home = torch.device("cpu") if config.training.enable_cpu_offload else device
    # A copy of the configuration, in which another attention is noted: not every part has them all.
    dtype = stored_dtype(config.training, config.lora, device.type)
    shadow = meta_model(deepcopy(model.config), "eager", dtype)
    buffers = {name for name, _ in model.named_buffers()}
    stored = {*stored_tensors(model)} if fill else set()
    loaded = fill and config.model.name_or_path is not None
    if loaded:
        for module in adapted_modules(model).values():
            module.to_empty(device=home, recurse=False)  # what no file holds
        places = {"": home} | dict.fromkeys(buffers & stored, device)
        load_weights(model, shadow, config.model, places, device)
    else:
        model.to_empty(device=home)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if all(name in names for pair in model.all_tied_weights_keys.items() for name in pair):
        tie(model)  # unless only one end of it is on this rank's pipeline stages
    place_buffers(model, shadow, buffers - stored if loaded else buffers, device)
    if not loaded:
        draw_weights(model, shadow, stored, device, config.training.seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)  # splitting and loading made new ones


def tie(model: PreTrainedModel) -> None:
    """Makes one parameter, in place, of those that share their values.

    `tie_weights` would also lengthen biases by nothing, which torch 2.11 cannot do to shards.
    """
    for name, source in model.all_tied_weights_keys.items():
        place, _, own = name.rpartition(".")
        setattr(model.get_submodule(place), own, model.get_parameter(source))


def weight_files(source: str) -> list[Path]:
    """The safetensors files of `source`, a folder or a Hub id (downloaded to the Hub's cache).

    Raises `UserError` when there is no such thing, or a file is missing.
    """
    kinds = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    source = hf_folder(source)
    problem = f"model.name_or_path: no folder {source!r}, and the Hub did not give it"
    mend = "check the name, and whether the Hub can be reached"
    with explained(problem, OSError, ValueError, mend=mend):
        is_here = os.path.isdir(source)
        folder = Path(source if is_here else snapshot_download(source, allow_patterns=kinds))
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = {SAFE_WEIGHTS_NAME}
    if index.exists():
        names = {*json.loads(index.read_text())["weight_map"].values()}
    files = [folder / name for name in sorted(names)]
    for file in files:
        if not file.exists():
            raise UserError(
                f"model.name_or_path: {source!r} lacks the weight file {file.relative_to(folder)}."
            )
    return files


def stored_slices(source: str) -> dict[str, Any]:
    """The tensors in the files of `source` by their names there, none of them read yet."""
    problem = f"{source}: a weight file is damaged"
    with explained(problem, SafetensorError, mend="download or write it again"):
        files = [safe_open(path, framework="pt") for path in weight_files(source)]
    return {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118


def check_base(setting: str, base: str, stated: str | None) -> None:
    """Raises `UserError` where adapters are of another model than `base`.

    That is seen where the one that they are `stated` to be of is still in its folder. Both may be
    one, trained further or quantised: the directions of the first rows of their tensors tell.
    """
    is_here = stated is not None and any(Path(stated).glob("*.safetensors"))
    if is_here and not _same_origin(str(stated), base):
        raise UserError(
            f"{setting}: {base} is another model than the adapters', {stated}: give that, or one "
            "made from it."
        )


def _same_origin(source: str, other: str) -> bool:
    found = stored_slices(source), stored_slices(other)
    both = [
        key
        for key in found[0].keys() & found[1].keys()
        if found[0][key].get_shape() == found[1][key].get_shape()
    ]

    def directions(slices: dict[str, Any]) -> Tensor:
        rows = (slices[key][:1].flatten().float() for key in both)
        return torch.cat([torch.zeros(1), *(normalize(row, dim=0) for row in rows)])

    one, two = map(directions, found)
    return bool(torch.dist(one, two) <= one.norm() / 2)


def _grown(stored: Any, rows: int, known: int, added: Set[int]) -> Tensor:
    """What a safetensors file has of a vocabulary, with `rows` rows.

    Those of the ids `added` and those that the file lacks are the mean of the first `known`.
    """
    read = stored[...]
    blocks = read[:known].split(4096)  # of which one at a time is float64
    mean = sum(block.double().sum(0) for block in blocks) / len(read[:known])
    grown = torch.cat([read, read.new_empty(max(rows - len(read), 0), *read.shape[1:])])
    grown[[*added, *range(len(read), rows)]] = mean.to(read.dtype)
    return grown


def load_weights(
    model: PreTrainedModel,
    shadow: PreTrainedModel,
    settings: ModelConfig,
    places: dict[str, torch.device],
    device: torch.device,
) -> None:
    """Loads the weights of `name_or_path` into the sharded meta `model`, in place.

    Each rank reads only the slices that it holds. `places` says to which device each weight goes,
    by its name or how that begins; what is packed is computed on `device`.

    transformers' own loader renames and fuses what its model classes store otherwise than the Hub
    does; it finds its rules by class, which sharding changes, hence `shadow`, the same model
    unsharded. Raises `UserError` when the files do not fit the model.
    """
    source = str(settings.name_or_path)
    slices = _slices_to_load(model, shadow, settings, device)
    home = places[""]
    placing = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(shadow),
        device_map=places,
        dtype=shadow.dtype,
        dtype_plan=shadow._get_dtype_plan(shadow.dtype),
    )

    def kept_home(_: nn.Module, __: str, made: nn.Parameter) -> nn.Parameter:
        """transformers makes a DTensor on its mesh's device, wherever that is to be."""
        return nn.Parameter(made.to(home), made.requires_grad)

    keeping: AbstractContextManager[Any] = nullcontext()
    if home != device:
        keeping = register_module_parameter_registration_hook(kept_home)
    with keeping:
        on_cpu = replace(placing, device_map={"": "cpu"})
        joined = _load_joined(model, shadow, slices, on_cpu, home)
        info, _ = convert_and_load_state_dict_in_model(model, slices, placing)
    lacking = info.missing_keys - {*model.all_tied_weights_keys} - joined
    missing = sorted(name for name in lacking if not name.endswith(PARTS))
    if missing or info.mismatched_keys or info.conversion_errors:
        problem = f"does not fit: {sorted(info.mismatched_keys)[:3]}"
        if missing:
            problem = f"lacks {missing[:3]}"
        raise UserError(
            f"model.name_or_path: the checkpoint in {source!r} {problem} "
            f"{info.conversion_errors or ''}"
        )


def _slices_to_load(
    model: PreTrainedModel, shadow: PreTrainedModel, settings: ModelConfig, device: torch.device
) -> dict[str, Any]:
    """What the files hold, in the forms that the model stores.

    Where the vocabulary is to grow, it is read whole, and the rows of new tokens, and all that the
    files lack, become the mean of those of the tokens before.
    """
    slices = stored_slices(str(settings.name_or_path))
    if settings.new_tokens or settings.vocabulary_multiple > 1:
        rows = shadow.config.get_text_config().vocab_size
        known, added = added_ids(settings)
        # What precedes these ends of names may differ.
        ends = {tuple(name.split(".")[-2:]) for name in vocabulary_weights(shadow)}
        for key, stored in slices.items():
            if tuple(key.split(".")[-2:]) in ends:
                slices[key] = _grown(stored, rows, known, added)
    if any(module.is_packed for module in wrapped_modules(model)):
        from lacuna.model.layers.quantized_files import packed_slices

        slices = slices | packed_slices(model, slices, device)  # which read the others
    return slices


def _load_joined(
    model: PreTrainedModel,
    shadow: PreTrainedModel,
    slices: dict[str, Any],
    placing: LoadStateDictConfig,
    home: torch.device,
) -> set[str]:
    """Loads, into `model` and off `slices`, what several tensors in files are joined or cut to.

    That is where it is along the dimension that shards cut: transformers' loader would join each
    rank's slices of all of them. Returns the names of what was loaded; `shadow` has it whole.
    """
    patterns = []
    for converter in placing.weight_mapping:
        operations = converter.operations if isinstance(converter, WeightConverter) else ()
        if any(type(step) in (Concatenate, Chunk) and step.dim == 0 for step in operations):
            patterns += [pattern.replace("*", ".*") for pattern in converter.source_patterns]
    sources = [key for key in slices if patterns and re.search("|".join(patterns), key)]
    if not sources:
        return set()
    found = {key: slices.pop(key) for key in sources}
    convert_and_load_state_dict_in_model(shadow, found, placing)
    whole = {name: one for name, one in shadow.named_parameters() if not one.is_meta}
    with torch.no_grad():
        for name in whole.keys() & {name for name, _ in model.named_parameters()}:
            place, _, own_name = name.rpartition(".")
            module = model.get_submodule(place).to_empty(device=home, recurse=False)
            made = module._parameters[own_name]
            local(made).copy_(own_part(whole[name], made))
    return {*whole}
