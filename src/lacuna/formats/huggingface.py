"""A trained model as a Hugging Face folder: safetensors with an index, configuration, tokenizer."""

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors.torch import _TYPES
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from lacuna.config import RunError
from lacuna.data.disk import whole_folder
from lacuna.data.unpacked import hf_folder
from lacuna.model.architecture import meta_model, stored_tensors
from lacuna.model.layers.wrapping import plain_tensor

FILE_BYTES = 5 * 10**9


def is_writer() -> bool:
    """Whether this process writes what all have gathered."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gathered(model: PreTrainedModel, wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The `wanted` tensors of a model, whole, one at a time, on the CPU, with adapters merged.

    They come in the dtypes of those `wanted`. Every rank must iterate, because gathering is a
    collective. Tensors that only some stages of a pipeline have are sent to all ranks.
    """
    tensors = stored_tensors(model)
    home = next(iter(tensors.values())).device
    held = [set(tensors)]
    if dist.is_initialized():
        held *= dist.get_world_size()
        dist.all_gather_object(held, set(tensors))
    for name, like in wanted.items():
        if name in tensors:
            tensor = plain_tensor(model, name).to(home, like.dtype)
        else:
            tensor = torch.empty_like(like, device=home)
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
    for _, layer in groupby(tensors, lambda named: _layer_of(named[0])):
        yield from revert_weight_conversion(shadow, dict(layer)).items()


def _layer_of(name: str) -> str:
    """The beginning of a tensor's name that those of the same decoder layer share."""
    layer = re.match(r".*?\.\d+\.", name)
    return layer[0] if layer else ""


def _write_files(
    folder: str,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: dict[str, Tensor],
    files: StateDictSplit,
) -> None:
    """Writes each of `tensors`, which have these `shapes`, to its place in one of `files`.

    The files are laid out first, so that each tensor is written when it comes and none is kept.
    """
    places: dict[str, tuple[str, int]] = {}
    for file, names in files.filename_to_tensors.items():
        ends = accumulate((shapes[name].nbytes for name in names), initial=0)
        spans = dict(zip(names, pairwise(ends), strict=True))
        header = _safetensors_header(shapes, spans)
        Path(folder, file).write_bytes(header)
        places |= {name: (file, len(header) + start) for name, (start, _) in spans.items()}
    for name, tensor in tensors:
        file, start = places[name]
        with open(os.path.join(folder, file), "r+b") as handle:
            handle.seek(start)
            handle.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        Path(folder, SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))


def _safetensors_header(shapes: dict[str, Tensor], spans: dict[str, tuple[int, int]]) -> bytes:
    """The first bytes of a safetensors file, which say where in the rest of it each tensor is."""
    dtypes = {dtype: name for name, dtype in _TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, span in spans.items():
        header[name] = {
            "dtype": dtypes[shapes[name].dtype],
            "shape": [*shapes[name].shape],
            "data_offsets": span,
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # as safetensors aligns its data
    return len(encoded).to_bytes(8, "little") + encoded


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    """Writes a tokenizer into `folder`. Raises `OSError` when the disk refuses."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The package tokenizers raises bare `Exception` for errors of the system.
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error


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
    code: Any = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    if getattr(code, "_auto_class", None):  # code that came with the model goes with it
        module = code.__module__.rpartition(".")[2]
        model_config.auto_map["AutoModelForCausalLM"] = f"{module}.{code.__name__}"
        os.makedirs(folder, exist_ok=True)
        custom_object_save(code, folder)
    model_config.save_pretrained(folder)
    try:
        generation = GenerationConfig.from_pretrained(hf_folder(source or folder))
    except OSError:  # many models have none: the configuration's tokens are used then
        generation = GenerationConfig.from_model_config(model_config)
    if tokenizer.chat_template:
        from lacuna.data.chat import end_of_turn  # an extension

        ends = end_of_turn(tokenizer)
        if len(ends) > 1:
            known = generation.eos_token_id or []
            known = [known] if isinstance(known, int) else known
            generation.eos_token_id = list(dict.fromkeys([*known, *ends]))
    generation.update(
        defaults_only=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    # Not by save_pretrained, which refuses what it finds odd: models of the Hub have temperatures
    # without do_sample.
    generation.to_json_file(os.path.join(folder, GENERATION_CONFIG_NAME))
    save_tokenizer(tokenizer, folder)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    dtype: torch.dtype,
    source: str | None = None,
) -> None:
    """Writes `model` to `folder` as `AutoModelForCausalLM.from_pretrained` opens it.

    All ranks must call it. Adapters are merged, in float32. The folder appears whole or not at all.
    """

    def describe(config: PretrainedConfig, unfinished: str) -> None:
        save_model_description(config, tokenizer, source, unfinished)

    write_model(model, folder, dtype, describe)


def write_model(
    model: PreTrainedModel,
    folder: str,
    dtype: torch.dtype,
    describe: Callable[[PretrainedConfig, str], None],
) -> None:
    """Writes the weights of `model` to `folder`, and what `describe` makes of its configuration.

    All ranks must call it. Adapters are merged, in float32. The folder appears whole or not at all:
    it is written beside its place and renamed.
    """
    # A copy, because building a model writes its attention and dtype into the configuration.
    shadow = meta_model(deepcopy(model.config), "eager", dtype)
    stored = stored_tensors(shadow)
    tensors = hub_tensors(gathered(model, stored), shadow)
    if not is_writer():
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
        name = type(shadow).__name__
        shadow.config.update({"use_cache": True, "dtype": dtype, "architectures": [name]})
        describe(shadow.config, unfinished)
