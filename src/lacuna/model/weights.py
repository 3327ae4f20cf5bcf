"""Fills a sharded meta model with Hugging Face safetensors or fresh weights, and its buffers."""

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

from lacuna.config import UserError, explained
from lacuna.config.adapters import LoraConfig
from lacuna.config.attentions import SCALE, SINKS, is_own
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.data.tokenizer import added_ids
from lacuna.data.unpacked import hf_folder
from lacuna.model.architecture import meta_model, stored_tensors, vocabulary_weights
from lacuna.model.initial import draw_weights, place_buffers
from lacuna.model.kind import is_scoring
from lacuna.model.layers.lora import PARTS, adapted_modules
from lacuna.model.layers.wrapping import stored_parameter, wrapped_modules
from lacuna.model.leftovers import check_files
from lacuna.model.vocabulary import grow_rows
from lacuna.parallel.fsdp import local, own_part
from lacuna.parallel.precision import stored_dtype


def fill_model(
    model: PreTrainedModel,
    trained: Set[str],
    source: ModelConfig,
    lora: LoraConfig,
    training: TrainingConfig,
    device: torch.device,
    fill: bool,
    on_cpu: Set[str] = frozenset(),
) -> None:
    """Gives a sharded meta model, in place, its memory, its buffers, and with `fill` its weights.

    Weights come from the files of `source`, or are drawn. Offloaded ones are on the CPU, and so are
    the modules of the paths `on_cpu`. All parameters but those `trained` are frozen.
    """
    home = torch.device("cpu") if training.enable_cpu_offload else device
    dtype = stored_dtype(training, lora, device.type)
    # It has eager attention, as not every part of a model has the run's, and notes that in a copy
    # of the configuration.
    shadow = meta_model(deepcopy(model.config), "eager", dtype)
    buffers = {name for name, _ in model.named_buffers()}
    stored = {*stored_tensors(model)} if fill else set()
    loaded = fill and source.name_or_path is not None
    if loaded:
        for module in adapted_modules(model).values():
            module.to_empty(device=home, recurse=False)  # no file has adapters
        if is_own(getattr(model.config, "attn_implementation", None)):
            from lacuna.model.learned_attention import begin_learned  # an extension

            begin_learned(model, str(source.name_or_path), home)
        places = {"": home} | dict.fromkeys(buffers & stored, device)
        places |= dict.fromkeys(on_cpu, torch.device("cpu"))
        load_weights(model, shadow, source, places, device)
    else:
        model.to_empty(device=home)
        for path in on_cpu:
            model.get_submodule(path).to_empty(device="cpu")
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if all(name in names for pair in model.all_tied_weights_keys.items() for name in pair):
        share_tied_parameters(model)  # unless this rank's pipeline stages have but one end of it
    if loaded:
        place_buffers(model, shadow, buffers - stored, device)
    else:
        place_buffers(model, shadow, buffers, device)
        if fill:
            draw_weights(model, shadow, stored, device, training.seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)  # splitting and loading made new ones


def share_tied_parameters(model: PreTrainedModel) -> None:
    """Makes one parameter of each two that are tied, in place.

    transformers' `tie_weights` would also pad biases by nothing, which torch 2.11 cannot do to
    shards.
    """
    for name, source in model.all_tied_weights_keys.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, model.get_parameter(source))


def weight_files(source: str) -> list[Path]:
    """The safetensors files of `source`, a folder or a Hub id (downloaded to the Hub's cache).

    Raises `UserError` when there is no such folder or id, or when a file is missing.
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
        if not file.exists() and any(folder.glob("pytorch_model*.bin")):
            raise UserError(
                f"model.name_or_path: {source!r} has weights in an older form, pytorch_model.bin: "
                f"write them anew with: lacuna convert {source} FOLDER --to hf"
            )
        if not file.exists():
            raise UserError(
                f"model.name_or_path: {source!r} lacks the weight file {file.relative_to(folder)}."
            )
    return files


def stored_slices(source: str) -> dict[str, Any]:
    """The tensors in the files of `source` by their names there; none of them is read yet."""
    problem = f"{source}: a weight file is damaged"
    with explained(problem, SafetensorError, mend="download or write it again"):
        files: list[Any] = [safe_open(path, framework="pt") for path in weight_files(source)]
    return {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118


def check_base(setting: str, base: str, stated: str | None) -> None:
    """Raises `UserError` where adapters belong to another model than `base`.

    `stated` is the folder of the model that they say they belong to, and nothing is checked unless
    it is still there. The two may also be one model, trained further or quantised, which the
    directions of the first rows of their tensors tell.
    """
    is_here = stated is not None and any(Path(stated).glob("*.safetensors"))
    if is_here and not _same_origin(str(stated), base):
        raise UserError(
            f"{setting}: {base} is another model than the adapters', {stated}: give that, or one "
            "made from it."
        )


def _same_origin(source: str, other: str) -> bool:
    """Whether the first rows of the tensors that two models share point about the same way."""
    ours = stored_slices(source)
    theirs = stored_slices(other)
    shared = [
        key
        for key in ours.keys() & theirs.keys()
        if ours[key].get_shape() == theirs[key].get_shape()
    ]

    def directions(slices: dict[str, Any]) -> Tensor:
        rows = (slices[key][:1].flatten().float() for key in shared)
        return torch.cat([torch.zeros(1), *(normalize(row, dim=0) for row in rows)])

    expected = directions(ours)
    return bool(torch.dist(expected, directions(theirs)) <= expected.norm() / 2)


def load_weights(
    model: PreTrainedModel,
    shadow: PreTrainedModel,
    settings: ModelConfig,
    places: dict[str, torch.device],
    device: torch.device,
) -> None:
    """Loads the weights of `name_or_path` into the sharded meta `model`, in place.

    Each rank reads only the slices that it has a share of. `places` gives the device of each
    weight by its name or how that begins, and packed weights are computed on `device`.

    transformers' own loader renames and fuses what its model classes store otherwise than files do.
    It finds its rules by class, and sharding changes the class, hence `shadow`: the same model
    unsharded. Raises `UserError` when the files do not fit the model.
    """
    source = str(settings.name_or_path)
    slices = _slices_to_load(shadow, settings)
    check_files(slices, shadow, f"model.name_or_path: the checkpoint in {source!r}")
    home = places[""]
    placing = LoadStateDictConfig(
        # transformers' two types of the same list differ.
        weight_mapping=get_model_conversion_mapping(shadow),  # type: ignore[arg-type]
        device_map=places,
        dtype=shadow.dtype,
        dtype_plan=shadow._get_dtype_plan(shadow.dtype),
    )

    def kept_home(_: nn.Module, __: str, made: nn.Parameter) -> nn.Parameter:
        """transformers makes DTensors on their mesh's device, wherever they are to be."""
        return nn.Parameter(made.to(home), made.requires_grad)

    keeping: AbstractContextManager[Any] = nullcontext()
    if home != device:
        # torch's types forget that what the hook returns is registered.
        keeping = register_module_parameter_registration_hook(kept_home)  # type: ignore[arg-type]
    with keeping:
        on_cpu = replace(placing, device_map={"": "cpu"})
        apart = _load_apart(model, shadow, slices, on_cpu, home, device)
        info, _ = convert_and_load_state_dict_in_model(model, slices, placing)
    lacking = info.missing_keys - {*model.all_tied_weights_keys} - apart
    missing = sorted(name for name in lacking if not name.endswith((*PARTS, SCALE, SINKS)))
    if missing or info.mismatched_keys or info.conversion_errors:
        problem = f"does not fit: {sorted(info.mismatched_keys)[:3]} {info.conversion_errors or ''}"
        if missing:
            problem = f"lacks {missing[:3]}"
        raise UserError(
            f"model.name_or_path: the checkpoint in {source!r} {problem.rstrip()}: give one of "
            "the whole model, with the configuration that it has."
        )


def _slices_to_load(shadow: PreTrainedModel, settings: ModelConfig) -> dict[str, Any]:
    """The tensors of the files, as many and as large as the model's.

    Where the vocabulary is to grow, it is read whole. The rows of new tokens, and all rows that the
    files lack, become the mean of the rows of earlier tokens.
    """
    slices = stored_slices(str(settings.name_or_path))
    if settings.new_tokens or settings.vocabulary_multiple > 1:
        rows = shadow.config.get_text_config().vocab_size
        known, added = added_ids(settings)
        # How the names begin may differ between files and model, so that only their ends count.
        ends = {
            tuple(name.split(".")[-2:])
            for name, weight in vocabulary_weights(shadow).items()
            if len(weight) == rows  # scores have no row for each token
        }
        for key, stored in slices.items():
            if tuple(key.split(".")[-2:]) in ends:
                slices[key] = grow_rows(stored, rows, known, added)
    if is_scoring(shadow.config):
        from lacuna.model.scores import with_new_scores  # an extension

        slices = with_new_scores(slices, shadow)
    return slices


def _load_apart(
    model: PreTrainedModel,
    shadow: PreTrainedModel,
    slices: dict[str, Any],
    placing: LoadStateDictConfig,
    home: torch.device,
    device: torch.device,
) -> set[str]:
    """Loads what transformers' loader could not load into shards, and returns its names.

    It is packed stacks, and what files join or cut along dimension 0, as shards do. It is loaded
    into `shadow` whole, copied into `model`, and taken off `slices`.
    """
    packed: set[str] = set()
    if any(module.packed_names for module in wrapped_modules(model)):
        from lacuna.model.layers.quantized_files import load_stacks, packed_slices

        packed = load_stacks(model, shadow, slices, placing, home, device)
        slices.update(packed_slices(model, {**slices}, device))  # which read the others
    patterns = []
    for converter in placing.weight_mapping or []:
        operations = converter.operations if isinstance(converter, WeightConverter) else []
        if any(isinstance(step, Concatenate | Chunk) and step.dim == 0 for step in operations):
            patterns += [pattern.replace("*", ".*") for pattern in converter.source_patterns]
    sources = [key for key in slices if patterns and re.search("|".join(patterns), key)]
    if not sources:
        return packed
    found = {key: slices.pop(key) for key in sources}
    convert_and_load_state_dict_in_model(shadow, found, placing)
    whole = {name: one for name, one in shadow.named_parameters() if not one.is_meta}
    with torch.no_grad():
        for name in whole.keys() & {name for name, _ in model.named_parameters()}:
            path, _, own_name = name.rpartition(".")
            module = model.get_submodule(path).to_empty(device=home, recurse=False)
            made = stored_parameter(module, own_name)
            local(made).copy_(own_part(whole[name], made))
    return packed | {*whole}
