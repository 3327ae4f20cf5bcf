"""A trained model as a Hugging Face folder: safetensors with an index, configuration, tokenizer; adapters as peft's."""

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors.torch import _TYPES, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.pytorch_utils import Conv1D
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from lacuna.config import RunError, logger
from lacuna.config.adapters import ADAPTER_FIELDS, ADAPTER_FILE, ADAPTER_WEIGHTS, LoraConfig
from lacuna.data.chat import end_of_turn
from lacuna.data.disk import whole_folder
from lacuna.data.gguf import hf_folder
from lacuna.model.architecture import meta_model, stored_tensors
from lacuna.model.lora import adapted_modules, add_adapters, file_name, merged_tensor

FILE_BYTES = 5 * 10**9
_EXPERTS_OF_OLD = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def _writes() -> bool:
    """Whether this process writes what all have gathered."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gathered(model: PreTrainedModel, wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Of a model's tensors those `wanted`, whole, one at a time, on the CPU in the types given, adapters merged.

    Every rank must iterate: gathering is a collective. What only some stages of a pipeline have
    they give to all.
    """
    tensors = stored_tensors(model)
    home, held = next(iter(tensors.values())).device, [set(tensors)]
    if dist.is_initialized():
        held *= dist.get_world_size()
        dist.all_gather_object(held, set(tensors))
    for name, like in wanted.items():
        known = name in tensors
        tensor = (
            merged_tensor(model, name).to(home, like.dtype)
            if known
            else torch.empty_like(like, device=home)
        )
        owners = [rank for rank, names in enumerate(held) if name in names]
        if len(owners) < len(held):
            dist.broadcast(tensor, src=owners[0])
        yield name, tensor.detach().cpu()


def hub_tensors(
    tensors: Iterable[tuple[str, Tensor]], shadow: PreTrainedModel
) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors one decoder layer at a time, under the names that files on the Hub have.

    The class of `shadow`, the whole model unsharded, tells transformers which fused weights
    (experts) to take apart.
    """
    for _, layer in groupby(tensors, lambda named: re.match(r"(.*?\.\d+\.)?", named[0])[0]):
        yield from revert_weight_conversion(shadow, dict(layer)).items()


def _write_files(
    folder: str,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: dict[str, Tensor],
    files: StateDictSplit,
) -> None:
    """Writes `tensors`, of these `shapes`, each to its place in one of `files`, so that none waits for others."""
    dtypes, places = {dtype: name for name, dtype in _TYPES.items()}, {}
    for file, names in files.filename_to_tensors.items():
        ends = accumulate((shapes[name].nbytes for name in names), initial=0)
        spans = dict(zip(names, pairwise(ends), strict=True))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, span in spans.items():
            header[name] = {
                "dtype": dtypes[shapes[name].dtype],
                "shape": [*shapes[name].shape],
                "data_offsets": span,
            }
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)  # as safetensors aligns its data
        Path(folder, file).write_bytes(len(encoded).to_bytes(8, "little") + encoded)
        places |= {name: (file, 8 + len(encoded) + start) for name, (start, _) in spans.items()}
    for name, tensor in tensors:
        file, start = places[name]
        with open(os.path.join(folder, file), "r+b") as handle:
            handle.seek(start)
            handle.write(tensor.reshape(-1).view(torch.uint8).numpy())
    if files.is_sharded:
        with open(os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME), "w") as file:
            json.dump(
                {"metadata": files.metadata, "weight_map": files.tensor_to_filename}, file, indent=2
            )


def save_model_description(
    model_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: str | None,
    folder: str,
) -> None:
    """Writes configuration, generation configuration and tokenizer into `folder`.

    `source` is the HF folder or id that the model came from, if any, whose generation settings are
    kept. Generation also stops where the chat template ends an answer.
    """
    code = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    if getattr(code, "_auto_class", None):  # it came with the model, and goes with it
        model_config.auto_map["AutoModelForCausalLM"] = (
            f"{code.__module__.rpartition('.')[2]}.{code.__name__}"
        )
        os.makedirs(folder, exist_ok=True)
        custom_object_save(code, folder)
    model_config.save_pretrained(folder)
    try:
        generation = GenerationConfig.from_pretrained(hf_folder(source or folder))
    except OSError:  # many models have none: the configuration's tokens are used then
        generation = GenerationConfig.from_model_config(model_config)
    ends, known = end_of_turn(tokenizer), generation.eos_token_id
    if len(ends) > 1:
        known = [known] if isinstance(known, int) else known or []
        generation.eos_token_id = list(dict.fromkeys([*known, *ends]))
    generation.update(
        defaults_only=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    # Not by save_pretrained, which refuses what it finds odd: models of the Hub have temperatures
    # without do_sample.
    generation.to_json_file(os.path.join(folder, GENERATION_CONFIG_NAME))
    tokenizer.save_pretrained(folder)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    dtype: torch.dtype,
    source: str | None = None,
) -> None:
    """Writes `model` to `folder` as `AutoModelForCausalLM.from_pretrained` opens it. All ranks must call it.

    Adapters are merged, in float32. The folder appears whole or not at all: it is written beside
    its place and renamed.
    """
    shadow = meta_model(
        deepcopy(model.config), "eager", dtype
    )  # which notes both in the configuration it is given
    stored = stored_tensors(shadow)
    tensors = hub_tensors(gathered(model, stored), shadow)
    if not _writes():
        deque(tensors, maxlen=0)
        return
    shapes = {
        name: torch.empty_like(tensor) for name, tensor in hub_tensors(stored.items(), shadow)
    }
    with whole_folder(folder) as unfinished:
        try:
            files = split_torch_state_dict_into_shards(shapes, max_shard_size=FILE_BYTES)
            _write_files(unfinished, tensors, shapes, files)
        except OSError as error:
            raise RunError(
                f"cannot write the model to {folder}: {error}. Checkpoints are intact."
            ) from error
        shadow.config.update(
            {"use_cache": True, "dtype": dtype, "architectures": [type(shadow).__name__]}
        )
        save_model_description(shadow.config, tokenizer, source, unfinished)


def _mistaken_by_peft(targets: Iterable[str], model: PreTrainedModel) -> list[str]:
    """The linear layers that peft would take for experts, by how their names end.

    It reads such names as those of experts before transformers fused them, also where they are of
    dense or shared layers beside these. Named as parameters, they stay what they are.
    """
    has_stacks = any(weight.ndim == 3 for weight in model.parameters())
    return [name for name in targets if has_stacks and name.rpartition(".")[2] in _EXPERTS_OF_OLD]


def misread_by_peft(names: Iterable[str], model: PreTrainedModel) -> list[str]:
    """The tensors of an adapter that peft would not find: it renames them as transformers does files.

    A pattern that is meant for the names of files may fit those of modules as well.
    """
    mapping = get_model_conversion_mapping(model) or ()
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    return [name for name in names if rename_source_key(name, renamings, [])[0] != name]


def export_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: LoraConfig,
    base: str | None,
    folder: str,
) -> None:
    """Writes adapters and whole modules of `model`, trained beside `base`, to `folder` as peft opens them.

    The tokenizer is written beside them. All ranks must call it.
    """
    shadow = meta_model(deepcopy(model.config), "eager", torch.float32)
    targets, parameters, whole = add_adapters(shadow, settings, torch.float32)
    trained = {
        name: parameter for name, parameter in shadow.named_parameters() if parameter.requires_grad
    }
    tensors = {file_name(name): tensor.contiguous() for name, tensor in gathered(model, trained)}
    for name, twin in shadow.all_tied_weights_keys.items():
        if twin in trained:  # peft ties nothing that it has a copy of
            tensors[file_name(name)] = tensors[file_name(twin)].clone()
            whole = [*dict.fromkeys((*whole, name.rpartition(".")[0], twin.rpartition(".")[0]))]
    if not _writes():
        return
    about = {theirs: getattr(settings, ours) for ours, theirs in ADAPTER_FIELDS.items()}
    # For peft to find from any folder: a local one by its whole path, of a GGUF file what it was
    # unpacked into.
    base = os.path.abspath(hf_folder(base)) if base is not None and os.path.exists(base) else base
    about |= {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "bias": "none",
    }
    transposed = any(isinstance(module, Conv1D) for module in adapted_modules(shadow).values())
    mistaken = _mistaken_by_peft(targets, shadow)
    if mistaken and settings.dora:
        logger.warning("%s: peft takes %s for experts; open hf instead", folder, mistaken[0])
    elif mistaken:
        targets = [name for name in targets if name not in mistaken]
        parameters = [*parameters, *(f"{name}.weight" for name in mistaken)]
        about["lora_dropout"] = 0.0  # of which peft has none for parameters
    misread = misread_by_peft(trained, shadow)
    if misread:
        logger.warning(
            "%s: peft does not find %s under its name; open hf instead", folder, misread[0]
        )
    about |= {"target_modules": targets, "target_parameters": parameters, "modules_to_save": whole}
    with whole_folder(folder) as unfinished:
        with open(os.path.join(unfinished, ADAPTER_FILE), "w") as file:
            json.dump(
                about | {"fan_in_fan_out": transposed, "inference_mode": True}, file, indent=2
            )
        save_file(tensors, os.path.join(unfinished, ADAPTER_WEIGHTS), metadata={"format": "pt"})
        tokenizer.save_pretrained(unfinished)
