"""GGUF, llama.cpp's format: how its models differ from transformers', and how it is unpacked."""

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from lacuna.config import UserError, explained, logger
from lacuna.data.cache import made_once
from lacuna.data.gguf_tokenizer import ENDS, SPECIAL_TOKENS, read_tokenizer

# transformers' model type -> llama.cpp's architecture. A file is read as the last of the types that
# share its architecture.
ARCHITECTURES = {name: name for name in ("qwen2", "qwen3", "gemma", "gemma2", "gpt2")}
ARCHITECTURES |= {"gemma3_text": "gemma3", "mistral": "llama", "llama": "llama"}

# What follows the architecture in a key -> transformers' setting.
SETTINGS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}


def gguf_package() -> ModuleType:
    """The package gguf. Raises UserError when it is not installed."""
    with explained(
        "GGUF needs a package", ImportError, mend="pip install -e '.[gguf]' -c constraints.txt"
    ):
        import gguf
    return gguf


def unpack(file: str) -> str:
    """A Hugging Face folder of the model and the tokenizer in a .gguf file, made once and kept.

    Raises `UserError` when the file cannot be read, or holds what lacuna does not know.
    """
    gguf_package()
    # Damaged files lead to errors of all kinds; the package tokenizers raises bare `Exception`.
    with explained(
        f"{file}: cannot be read as a GGUF model",
        Exception,
        mend="check the file, or take another",
    ):
        about = os.stat(file)
        told_apart = f"{os.path.realpath(file)} {about.st_size} {about.st_mtime_ns}"
        name = f"{Path(file).stem}-{hashlib.sha256(told_apart.encode()).hexdigest()[:16]}"
        return str(made_once(name, partial(_write_folder, file)))


def tensor_names(model: nn.Module, config: PretrainedConfig) -> dict[str, str | None]:
    """llama.cpp's name of each parameter of a model, None where it has no place for one."""
    gguf = gguf_package()
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config.model_type].upper()]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    ends = (".weight", ".bias")
    return {name: names.get_name(name, ends) for name, _ in model.named_parameters()}


def converted(tensor: Tensor, name: str, config: PretrainedConfig, back: bool = False) -> Tensor:
    """A tensor of transformers as llama.cpp keeps it under `name`, or the way `back`.

    llama.cpp's Llama rotates neighbouring numbers, where transformers' rotates the halves of a
    head. Its Gemma multiplies by the weight of a norm, where transformers' multiplies by 1 more.
    The matrices of its GPT-2 are [out, in].
    """
    architecture = ARCHITECTURES[config.model_type]
    part = name.split(".")[-2]
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        sizes = (heads, -1, 2) if back else (heads, 2, -1)
        parted = tensor.unflatten(0, sizes)
        return cast(Tensor, parted.transpose(1, 2).flatten(0, 2))
    if architecture.startswith("gemma") and part.endswith("norm"):
        return tensor + (-1 if back else 1)
    if architecture == "gpt2" and name.startswith("blk.") and tensor.ndim == 2:
        return tensor.T
    return tensor


def rope_factors(config: PretrainedConfig) -> Tensor:
    """What a Llama 3's frequencies of rotation are divided by, float32 [head_dim / 2]."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    places = torch.arange(len(scaled)) / len(scaled)
    unscaled: Tensor = config.rope_parameters["rope_theta"] ** -places
    return unscaled / scaled


def _write_folder(file: str, folder: str) -> None:
    """Writes the model in `file` to `folder`: bfloat16 where the file is, else float32."""
    gguf = gguf_package()
    reader = _bounded_reader(gguf)(file)
    logger.info("unpacking %s, once, into %s", file, os.path.dirname(folder))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    if reader.byte_order == "S":
        raise UserError("its numbers are big-endian.")
    if fields.get("split.count", 1) > 1:
        raise UserError("it is one of several parts; join them with llama-gguf-split.")
    for key, value in fields.items():
        if isinstance(value, float):
            # Numbers are float32: the shortest decimal that becomes the same is what was meant.
            fields[key] = float(str(np.float32(value)))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = torch.tensor(tensors.pop(ROPE_FACTORS).data) if ROPE_FACTORS in tensors else None
    config = read_config(fields, tensors, factors)
    tokenizer = read_tokenizer(fields)
    is_bfloat16 = tensors["token_embd.weight"].tensor_type.name == "BF16"
    config.dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    names = _names_in_file(config, tensors)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    _write_weights(folder, names, tensors, config)
    ends = [fields[end] for end in ENDS if end in fields]
    generation = GenerationConfig(eos_token_id=ends)
    generation.save_pretrained(folder)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _names_in_file(config: PretrainedConfig, tensors: dict[str, Any]) -> dict[str, str]:
    """llama.cpp's name of each parameter, after comparing the shapes of all with the file's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {name: str(theirs) for name, theirs in tensor_names(model, config).items()}
    wanted = {
        (names[name], *converted(one, names[name], config).shape)
        for name, one in model.named_parameters()
    }
    found = {(name, *map(int, reversed(tensor.shape))) for name, tensor in tensors.items()}
    odd = sorted(wanted ^ found)
    if odd:
        raise UserError(f"its tensors are not those of a {config.model_type} model: {odd[:1]}.")
    return names


def _write_weights(
    folder: str, names: dict[str, str], tensors: dict[str, Any], config: PretrainedConfig
) -> None:
    """Writes the weights of a file, in the types of `config`, each tensor to a file of its own."""
    gguf = gguf_package()
    files = {name: f"{name}.safetensors" for name in names}
    for name, theirs in names.items():
        read = torch.tensor(gguf.dequantize(tensors[theirs].data, tensors[theirs].tensor_type))
        tensor = converted(read, theirs, config, back=True).to(config.dtype).contiguous()
        save_file({name: tensor}, os.path.join(folder, files[name]), metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    Path(folder, SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))


def _bounded_reader(gguf: ModuleType) -> Any:
    """gguf's reader, which here refuses a file that claims to hold more bytes than it has."""

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
        ) -> np.ndarray:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise UserError(f"it claims {end} bytes or more, and has {len(self.data)}.")
            read: np.ndarray = super()._get(int(offset), dtype, count, override_order)
            return read

    return Reader


def settings_of(architecture: str) -> dict[str, str]:
    """What follows the architecture in its keys -> transformers' setting."""
    return SETTINGS | ({"feed_forward_length": "n_inner"} if architecture == "gpt2" else {})


def read_config(
    fields: dict[str, Any], names: Collection[str | None], factors: Tensor | None
) -> PretrainedConfig:
    """The configuration of the model with these fields, names of tensors, and factors of rotation.

    Raises `UserError` when it is none of `ARCHITECTURES`, or has a rotation that lacuna lacks.
    """
    architecture = fields["general.architecture"]
    types = {theirs: ours for ours, theirs in ARCHITECTURES.items()}
    if architecture not in types:
        raise UserError(f"it is a {architecture} model; known are {', '.join(types)}.")
    about = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    settings = {ours: about[key] for key, ours in settings_of(architecture).items() if key in about}
    layers = settings.get("num_hidden_layers", 0)
    if layers > len(names):
        raise UserError(f"it claims {layers} layers, and has {len(names)} tensors.")
    settings["vocab_size"] = len(fields["tokenizer.ggml.tokens"])
    settings["tie_word_embeddings"] = "output.weight" not in names
    for name, theirs in SPECIAL_TOKENS.items():
        settings[f"{name}_id"] = fields.get(f"tokenizer.ggml.{theirs}_id")
    if architecture == "llama":
        settings["attention_bias"] = "blk.0.attn_q.bias" in names
        settings["mlp_bias"] = "blk.0.ffn_up.bias" in names
    part = settings["hidden_size"] // settings["num_attention_heads"]
    settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    settings.setdefault("head_dim", part)
    # The largest models scale queries otherwise; llama.cpp knows them by their number of layers.
    is_largest = settings["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}.get(architecture)
    settings["query_pre_attn_scalar"] = part if is_largest else settings["head_dim"]
    settings["rope_parameters"] = _rope_parameters(architecture, about)
    if isinstance(pattern := about.get("attention.sliding_window_pattern"), list):
        settings["layer_types"] = [
            "sliding_attention" if slides else "full_attention" for slides in pattern
        ]
    usual = AutoConfig.for_model(types[architecture])
    known = {name: value for name, value in settings.items() if hasattr(usual, name)}
    config = type(usual)(**known)
    if factors is not None:
        config.rope_parameters |= _LLAMA3 | {"factor": round(factors.max().item(), 4)}
        expected = rope_factors(config)
        if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4):
            raise UserError(f"{ROPE_FACTORS} is not that of a Llama 3.")
    return config


def _rope_parameters(architecture: str, about: dict[str, Any]) -> dict[str, Any]:
    """How positions are rotated, in transformers' terms."""
    unnamed = "linear" if about.keys() & {"rope.scaling.factor", "rope.scale_linear"} else "none"
    scaling = about.get("rope.scaling.type", unnamed)
    if scaling != "none":
        raise UserError(f"it scales positions ({scaling}), as lacuna cannot.")
    bases = (about.get(f"rope.freq_base{which}", 10000.0) for which in ("", "_swa"))
    whole, near = ({"rope_type": "default", "rope_theta": base} for base in bases)
    return (
        {"full_attention": whole, "sliding_attention": near} if architecture == "gemma3" else whole
    )
