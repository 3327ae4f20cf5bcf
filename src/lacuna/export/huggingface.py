"""A trained model as a Hugging Face folder: safetensors with an index, configuration, tokenizer; adapters as peft's."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from lacuna.config import RunError
from lacuna.config.sections import ADAPTER_FIELDS, ADAPTER_FILE, LoraConfig
from lacuna.data.chat import end_of_turn
from lacuna.model.architecture import meta_model, stored_tensors
from lacuna.model.lora import WEIGHTS, adapted_modules, add_adapters, file_name, merged_tensor

FILE_BYTES = 5 * 10**9


def gathered(
    model: PreTrainedModel, wanted: dict[str, Tensor], pipeline: ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Of a model's tensors those `wanted`, whole, one at a time, on the CPU in the types given, adapters merged.

    Every rank must iterate: gathering is a collective. The ranks of a `pipeline` give each other what they have.
    """
    tensors = stored_tensors(model)
    owners: list[Any] = [None] * (0 if pipeline is None else pipeline.size())
    if pipeline is not None:
        dist.all_gather_object(owners, list(tensors), group=pipeline)
    home = next(iter(tensors.values())).device
    for name, like in wanted.items():
        known = name in tensors  # else another stage has it
        tensor = merged_tensor(model, name).to(home, like.dtype) if known else torch.empty_like(like, device=home)
        if pipeline is not None:
            owner = next(stage for stage, held in enumerate(owners) if name in held)
            dist.broadcast(tensor, group=pipeline, group_src=owner)
        yield name, tensor if tensor.is_meta else tensor.detach().cpu()


def hub_tensors(
    model: PreTrainedModel, shadow: PreTrainedModel, pipeline: ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors one decoder layer at a time, under the names that files on the Hub have, on the CPU.

    Every rank must iterate. `shadow` is the whole model unsharded, which has the types wanted, and whose class tells
    transformers which fused weights (experts) to take apart again.
    """
    tensors = gathered(model, stored_tensors(shadow), pipeline)
    for _, layer in groupby(tensors, lambda named: re.match(r"(.*?\.\d+\.)?", named[0])[0]):
        yield from revert_weight_conversion(shadow, dict(layer)).items()


def _write_files(folder: str, tensors: Iterable[tuple[str, Tensor]], files: StateDictSplit) -> None:
    """Writes each of `files` once its tensors have come, so that no more than one of them is in memory at a time."""
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        waiting[name] = tensor.contiguous()
        file = files.tensor_to_filename[name]
        together = files.filename_to_tensors[file]
        if waiting.keys() >= set(together):
            ready = {name: waiting.pop(name) for name in together}
            try:
                save_file(ready, os.path.join(folder, file), metadata={"format": "pt"})
            except SafetensorError as error:  # what the system says of a full disk arrives as this
                raise RunError(f"cannot write the model to {folder}: {error}. Checkpoints are intact.") from error
    if files.is_sharded:
        with open(os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME), "w") as file:
            json.dump({"metadata": files.metadata, "weight_map": files.tensor_to_filename}, file, indent=2)


def save_model_description(
    model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, source: str | None, folder: str
) -> None:
    """Writes configuration, generation configuration and tokenizer into `folder`.

    `source` is the HF folder or id that the model came from, if any, whose generation settings are kept. Generation
    also stops where the chat template ends an answer.
    """
    model_config.save_pretrained(folder)
    try:
        generation = GenerationConfig.from_pretrained(source or folder)
    except OSError:  # many models have none: the configuration's tokens are used then
        generation = GenerationConfig.from_model_config(model_config)
    ends, known = end_of_turn(tokenizer), generation.eos_token_id
    if len(ends) > 1:
        known = [known] if isinstance(known, int) else known or []
        generation.eos_token_id = list(dict.fromkeys([*known, *ends]))
    generation.update(defaults_only=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    # Not by save_pretrained, which refuses what it finds odd: models of the Hub have temperatures without do_sample.
    generation.to_json_file(os.path.join(folder, GENERATION_CONFIG_NAME))
    tokenizer.save_pretrained(folder)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    dtype: torch.dtype,
    is_first: bool,
    source: str | None = None,
    pipeline: ProcessGroup | None = None,
) -> None:
    """Writes `model` to `folder` as `AutoModelForCausalLM.from_pretrained` opens it. All ranks must call it.

    `pipeline` is the group of the ranks that have the other layers, if there are any. Adapters are merged, in float32.
    The folder appears whole or not at all: it is written beside its place and renamed.
    """
    shadow = meta_model(deepcopy(model.config), "eager", dtype)  # which notes both in the configuration it is given
    tensors = hub_tensors(model, shadow, pipeline)
    if not is_first:
        for _ in tensors:
            pass
        return
    shapes = {name: torch.empty_like(tensor) for name, tensor in hub_tensors(shadow, shadow)}
    unfinished = f"{folder.rstrip(os.sep)}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(unfinished)
    _write_files(unfinished, tensors, split_torch_state_dict_into_shards(shapes, max_shard_size=FILE_BYTES))
    shadow.config.update({"use_cache": True, "dtype": dtype, "architectures": [type(shadow).__name__]})
    save_model_description(shadow.config, tokenizer, source, unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)


def describe_adapter(model: PreTrainedModel, settings: LoraConfig, base: str | None, folder: str) -> PreTrainedModel:
    """Writes peft's description of a run's adapter to `folder`; returns the whole model with it, without memory."""
    shadow = meta_model(deepcopy(model.config), "eager", torch.float32)
    targets, whole = add_adapters(shadow, settings, torch.float32)
    about = {theirs: getattr(settings, ours) for ours, theirs in ADAPTER_FIELDS.items()}
    about |= {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none"}
    transposed = any(isinstance(module, Conv1D) for module in adapted_modules(shadow).values())
    about |= {"target_modules": targets, "modules_to_save": whole, "fan_in_fan_out": transposed}
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ADAPTER_FILE), "w") as file:
        json.dump(about | {"inference_mode": True}, file, indent=2)
    return shadow


def export_adapter(
    model: PreTrainedModel,
    settings: LoraConfig,
    base: str | None,
    folder: str,
    is_first: bool,
    pipeline: ProcessGroup | None = None,
) -> None:
    """Writes adapters and whole modules of `model`, trained beside `base`, to `folder`. All ranks must call it."""
    shadow = describe_adapter(model, settings, base, folder)
    trained = {name: parameter for name, parameter in shadow.named_parameters() if parameter.requires_grad}
    tensors = {file_name(name): tensor.contiguous() for name, tensor in gathered(model, trained, pipeline)}
    if is_first:
        save_file(tensors, os.path.join(folder, WEIGHTS), metadata={"format": "pt"})
