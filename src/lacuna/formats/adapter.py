"""Writes adapters alone, as a folder that peft opens, and says which base they fit."""

import json
import math
import os
import tomllib
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from lacuna.config import UserError, logger
from lacuna.config.adapters import ADAPTER_FIELDS, ADAPTER_FILE, ADAPTER_WEIGHTS, LoraConfig
from lacuna.data.disk import whole_folder
from lacuna.data.unpacked import hf_folder
from lacuna.formats.checkpoint import DESCRIPTION, RUN
from lacuna.formats.huggingface import gathered, is_writer, save_tokenizer
from lacuna.model.architecture import meta_model
from lacuna.model.kind import is_scoring
from lacuna.model.layers.adapter_files import file_name
from lacuna.model.layers.lora import adapted_modules, add_adapters, scale_of
from lacuna.model.weights import check_base

_EXPERTS_OF_OLD = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def _mistaken_by_peft(targets: Iterable[str], model: PreTrainedModel) -> list[str]:
    """The linear layers that peft would take for experts because of how their names end.

    peft takes such names for those of experts before transformers fused them, even where they
    belong to dense or shared layers. Layers that are named as parameters are read correctly.
    """
    has_stacks = any(weight.ndim == 3 for weight in model.parameters())
    return [name for name in targets if has_stacks and name.rpartition(".")[2] in _EXPERTS_OF_OLD]


def misread_by_peft(names: Iterable[str], model: PreTrainedModel) -> list[str]:
    """The tensors of an adapter that peft would not find.

    peft renames tensors as transformers renames those in files, and a pattern that is meant for
    names in files may fit names of modules as well.
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
    """Writes the adapters and whole modules that were trained beside `base`, as peft opens them.

    They go to `folder`, together with the tokenizer. All ranks must call it.
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
            both = (name.rpartition(".")[0], twin.rpartition(".")[0])
            whole = [*dict.fromkeys((*whole, *both))]
    if not is_writer():
        return
    about = {theirs: getattr(settings, ours) for ours, theirs in ADAPTER_FIELDS.items()}
    task = "SEQ_CLS" if is_scoring(model.config) else "CAUSAL_LM"
    about |= {"peft_type": "LORA", "task_type": task, "bias": "none"}
    about |= {"base_model_name_or_path": _absolute_base(base), "inference_mode": True}
    layers = adapted_modules(shadow).values()
    about["fan_in_fan_out"] = any(isinstance(layer, Conv1D) for layer in layers)
    mistaken = _mistaken_by_peft(targets, shadow)
    if mistaken and settings.dora:
        logger.warning("%s: peft takes %s for experts; open hf instead", folder, mistaken[0])
    elif mistaken:
        targets = [name for name in targets if name not in mistaken]
        parameters = [*parameters, *(f"{name}.weight" for name in mistaken)]
        about["lora_dropout"] = 0.0  # peft has no dropout for parameters
    misread = misread_by_peft(trained, shadow)
    if misread:
        logger.warning(
            "%s: peft does not find %s under its name; open hf instead", folder, misread[0]
        )
    about |= {"target_modules": targets, "target_parameters": parameters, "modules_to_save": whole}
    with whole_folder(folder) as unfinished:
        Path(unfinished, ADAPTER_FILE).write_text(json.dumps(about, indent=2))
        save_file(tensors, os.path.join(unfinished, ADAPTER_WEIGHTS), metadata={"format": "pt"})
        save_tokenizer(tokenizer, unfinished)


def require_same_base(path: str, settings: LoraConfig, base: str | None, seed: int) -> None:
    """Refuses to take the adapters of the checkpoint `path` for what they were not trained for.

    Raises `UserError` where that was another base than `base`, or, if that is None, than the random
    weights of `seed`; or another scale than that of the `settings`.
    """
    settings_file = Path(path, DESCRIPTION, RUN)
    if not settings_file.exists():
        return
    setting = "checkpoint.initial_load_path"
    before = tomllib.loads(settings_file.read_text())
    scales = [scale_of(LoraConfig.model_validate(before["lora"] | {"adapter": ()}))]
    scales.append(scale_of(settings))
    if not math.isclose(*scales):
        raise UserError(
            f"{setting}: its adapters count {scales[0]:g} times, and {scales[1]:g} times here: set "
            "lora.alpha, lora.rank and lora.rslora as they were."
        )
    stated = before["model"].get("name_or_path")
    if stated is not None and base is not None:
        check_base(setting, base, stated)
        return
    seed_before = before["training"]["seed"]
    if stated is not None or base is not None or seed_before != seed:
        was = stated or f"random weights of training.seed = {seed_before}"
        raise UserError(
            f"{setting}: its adapters were trained beside {was}, and not what is here: give that."
        )


def _absolute_base(base: str | None) -> str | None:
    """The name by which peft finds a base, whatever the working folder.

    That is the whole path of a local folder, or of the folder that a GGUF file was unpacked into.
    """
    if base is None or not os.path.exists(base):
        return base
    return os.path.abspath(hf_folder(base))
