"""A trained model as one GGUF file, which llama.cpp and what is built on it run."""

import math
import os
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import UserError, explained
from lacuna.config.attentions import is_own
from lacuna.data.gguf import (
    ARCHITECTURES,
    ROPE_FACTORS,
    converted,
    gguf_package,
    read_config,
    rope_factors,
    tensor_names,
)
from lacuna.formats.gguf_fields import (
    check_model,
    check_tokenizer,
    model_fields,
    tokenizer_fields,
)

# Types of weights that the package gguf writes. A program of llama.cpp makes all other types out of
# one of these.
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
QUANTIZER = "llama-quantize"

_LARGEST = 65504.0  # of float16, in which all these types but BF16 have their numbers or scales


def require_writable_type(kind: str) -> None:
    """Raises `UserError` when what writes weights of this type is not installed."""
    gguf_package()
    if kind.upper() == "F32":
        raise UserError(f"--type {kind}: the weights would go through 16 bits; choose F16 or BF16.")
    if kind not in TYPES and shutil.which(QUANTIZER) is None:
        raise UserError(
            f"--type {kind} is left to llama.cpp's {QUANTIZER}, which is not installed; install "
            f"llama.cpp, or choose one of {', '.join(TYPES)}."
        )


def export_gguf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: str, kind: str
) -> None:
    """Writes `model`, unsharded, to `file`, with weights of the type `kind`.

    The type is one of `TYPES` or of llama-quantize's. The file appears whole or not at all. Raises
    `UserError` when GGUF or the type of weights cannot hold the model or its tokenizer.
    """
    attention = getattr(model.config, "attn_implementation", None)
    if is_own(attention):
        raise UserError(
            f"GGUF: the model was trained with the attention {attention}, and llama.cpp has only "
            "softmax: convert it --to hf."
        )
    unfinished = f"{file}.unfinished"
    quantised = f"{file}.quantised"
    written = kind
    if kind not in TYPES:
        written = "BF16" if model.dtype == torch.bfloat16 else "F16"
    try:
        with explained(
            f"{file}: cannot be written", OSError, mend="make room, or choose another target"
        ):
            os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
            _write_file(model, tokenizer, unfinished, written)
        if kind != written:
            command = [QUANTIZER, unfinished, quantised, kind]
            done = subprocess.run(command, capture_output=True, errors="replace")
            if done.returncode != 0:
                said = done.stderr.strip().rpartition("\n")[2]
                raise UserError(f"--type {kind}: {QUANTIZER} failed: {said}.")
            os.replace(quantised, unfinished)
        os.replace(unfinished, file)
    finally:
        for path in (unfinished, quantised):
            Path(path).unlink(missing_ok=True)


def _write_file(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: str, kind: str
) -> None:
    """Writes a file, a tensor at a time."""
    gguf = gguf_package()
    config = deepcopy(model.config)
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"no {config.model_type} model can be a GGUF file, only {known}.")
    names = tensor_names(model, config)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    homeless = [name for name, theirs in names.items() if theirs is None]
    if homeless:
        raise UserError(f"GGUF has no place for {homeless[:1]} in a {config.model_type} model.")
    fields = model_fields(config) | tokenizer_fields(tokenizer, model)
    if config.model_type == "llama" and config.rope_parameters["rope_type"] == "llama3":
        names["factors"] = ROPE_FACTORS
        tensors["factors"] = rope_factors(config)
    check_model(config, read_config(fields, names.values(), tensors.get("factors")))
    check_tokenizer(fields, tokenizer)
    fields["general.file_type"] = int(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    fields["general.quantization_version"] = 2
    writer = gguf.GGUFWriter(file, fields.pop("general.architecture"))
    for key, value in fields.items():
        is_number = type(value) is int
        of_value = gguf.GGUFValueType.UINT32 if is_number else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, of_value)
    placed = {name: str(theirs) for name, theirs in names.items()}
    _write_tensors(writer, tensors, placed, config, kind)
    writer.close()


def _write_tensors(
    writer: Any,
    tensors: dict[str, Tensor],
    names: dict[str, str],
    config: PretrainedConfig,
    kind: str,
) -> None:
    """Writes the header and, one at a time, the `tensors`, under llama.cpp's `names` of them."""
    gguf = gguf_package()
    types = {}
    for name, theirs in names.items():
        shape = converted(tensors[name].detach().to("meta"), theirs, config).shape
        types[name] = gguf.GGMLQuantizationType[_type_of(theirs, shape, kind)]
        size = math.prod(gguf.quant_shape_to_byte_shape(shape, types[name]))
        writer.add_tensor_info(theirs, shape, np.dtype(np.float32), size, types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, theirs in names.items():
        tensor = converted(tensors[name].detach().float(), theirs, config).contiguous()
        if types[name].name not in ("F32", "BF16") and tensor.abs().max() > _LARGEST:
            raise UserError(
                f"{name} has numbers above {_LARGEST:.0f}, which {kind} cannot hold; choose "
                f"--type BF16."
            )
        writer.write_tensor_data(gguf.quantize(tensor.numpy(), types[name]))


def _type_of(name: str, shape: torch.Size, kind: str) -> str:
    """The type of one tensor.

    It is `kind`, or a finer one where llama.cpp or the format needs it, or much depends on it.
    """
    if len(shape) == 1 or name == "position_embd.weight":
        return "F32"
    if kind.startswith("Q") and shape[-1] % 32:  # the length of a block that shares its scale
        return "F16"
    if kind.startswith("Q") and name in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    return kind
