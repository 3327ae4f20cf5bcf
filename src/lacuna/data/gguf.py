"""GGUF, the format of llama.cpp: how its models differ from transformers', and files of it read as folders."""

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.tokenization_utils_base import generate_merges
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from lacuna.config import explained, logger, refuse
from lacuna.data.cache import made_once

# transformers' model type -> llama.cpp's architecture, which is read as the last type that has it.
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
SPECIAL_TOKENS = {"bos_token": "bos_token", "eos_token": "eos_token"}
SPECIAL_TOKENS |= {"unk_token": "unknown_token", "pad_token": "padding_token"}
ENDS = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
BLANK = "▁"

ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}


def _parting(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)|\p{{N}}"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)

# llama.cpp's name of how a byte-level tokenizer parts texts, within whose parts it merges -> what
# does so.
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "llama-bpe": _parting(_WORDS + "{1,3}" + _OTHERS),
    "qwen2": _parting(_WORDS + _OTHERS),
    "tekken": _parting(_CASED + _OTHERS.replace("[\\r\\n]*", "[\\r\\n/]*")),
}
# Those with which llama.cpp leaves a part that is a token as it is, and by default begins a text
# with a token.
_WHOLE = {"llama-bpe", "tekken"}


def gguf_package() -> ModuleType:
    """The package gguf. Raises UserError when it is not installed."""
    with explained("GGUF needs a package", ImportError, mend="pip install 'lacuna-train[gguf]'"):
        import gguf
    return gguf


def hf_folder(source: str) -> str:
    """`source`, or where that is a .gguf file, a Hugging Face folder of its model and tokenizer.

    The folder is made once and kept with the caches of `datasets`. Raises UserError when the file
    cannot be read, or holds what lacuna does not know.
    """
    if not source.endswith(".gguf") or os.path.isdir(source):
        return source
    gguf_package()
    # Damaged files end in errors of all kinds, of tokenizers in bare ones.
    with explained(
        f"{source}: cannot be read as a GGUF model",
        Exception,
        mend="check the file, or take another",
    ):
        about = os.stat(source)
        told_apart = f"{os.path.realpath(source)} {about.st_size} {about.st_mtime_ns}"
        name = f"{Path(source).stem}-{hashlib.sha256(told_apart.encode()).hexdigest()[:16]}"
        return str(made_once(name, partial(_write_folder, source)))


def tensor_names(model: nn.Module, config: PretrainedConfig) -> dict[str, str | None]:
    """By transformers' names of a model's parameters those of llama.cpp, None where it has no place for one."""
    gguf = gguf_package()
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config.model_type].upper()]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    return {
        name: names.get_name(name, (".weight", ".bias")) for name, _ in model.named_parameters()
    }


def converted(tensor: Tensor, name: str, config: PretrainedConfig, back: bool = False) -> Tensor:
    """A tensor of transformers as llama.cpp keeps it under `name`, or the way `back`.

    Its Llama rotates neighbouring numbers where transformers' rotates the halves of a head, its
    Gemma multiplies by the weight of a norm and not by 1 more, and the matrices of its GPT-2 are
    [out, in].
    """
    architecture, part = ARCHITECTURES[config.model_type], name.split(".")[-2]
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        return (
            tensor.unflatten(0, (heads, -1, 2) if back else (heads, 2, -1))
            .transpose(1, 2)
            .flatten(0, 2)
        )
    if architecture.startswith("gemma") and part.endswith("norm"):
        return tensor + (-1 if back else 1)
    return (
        tensor.T
        if architecture == "gpt2" and name.startswith("blk.") and tensor.ndim == 2
        else tensor
    )


def rope_factors(config: PretrainedConfig) -> Tensor:
    """What a Llama 3's frequencies of rotation are divided by, float32 [head_dim / 2]."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return (
        config.rope_parameters["rope_theta"] ** (-torch.arange(len(scaled)) / len(scaled)) / scaled
    )


def _write_folder(file: str, folder: str) -> None:
    """Writes the model in `file` to `folder`, a tensor at a time: bfloat16 where the file is, else float32."""
    gguf = gguf_package()
    reader = _bounded_reader(gguf)(file)
    logger.info("unpacking %s, once, into %s", file, os.path.dirname(folder))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    refuse({"its numbers are big-endian": reader.byte_order == "S"})
    refuse(
        {
            "it is one of several parts; join them with llama-gguf-split": fields.get(
                "split.count", 1
            )
            > 1
        }
    )
    # Numbers are float32: what was meant is the shortest that becomes the same.
    fields |= {
        key: float(str(np.float32(value)))
        for key, value in fields.items()
        if isinstance(value, float)
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = torch.tensor(tensors.pop(ROPE_FACTORS).data) if ROPE_FACTORS in tensors else None
    config, tokenizer = read_config(fields, tensors, factors), read_tokenizer(fields)
    config.dtype = (
        torch.bfloat16 if tensors["token_embd.weight"].tensor_type.name == "BF16" else torch.float32
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = tensor_names(model, config)
    shapes = {
        (names[name], *converted(one, str(names[name]), config).shape)
        for name, one in model.named_parameters()
    }
    odd = sorted(
        shapes ^ {(name, *map(int, reversed(tensor.shape))) for name, tensor in tensors.items()}
    )
    refuse({f"its tensors are not those of a {config.model_type} model: {odd[:1]}": odd != []})
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    files = {name: f"{name}.safetensors" for name in names}
    for name, theirs in names.items():
        read = torch.tensor(gguf.dequantize(tensors[theirs].data, tensors[theirs].tensor_type))
        tensor = converted(read, theirs, config, back=True).to(config.dtype).contiguous()
        save_file({name: tensor}, os.path.join(folder, files[name]), metadata={"format": "pt"})
    Path(folder, SAFE_WEIGHTS_INDEX_NAME).write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    GenerationConfig(eos_token_id=[fields[end] for end in ENDS if end in fields]).save_pretrained(
        folder
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _bounded_reader(gguf: ModuleType) -> type:
    """A reader for which a file holds no more than it has bytes, whatever it claims: gguf's own would read on."""

    class Reader(gguf.GGUFReader):
        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
        ) -> np.ndarray:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            refuse(
                {f"it claims {end} bytes or more, and has {len(self.data)}": end > len(self.data)}
            )
            return super()._get(int(offset), dtype, count, override_order)

    return Reader


def settings_of(architecture: str) -> dict[str, str]:
    """What follows the architecture in its keys -> transformers' setting."""
    return SETTINGS | ({"feed_forward_length": "n_inner"} if architecture == "gpt2" else {})


def read_config(
    fields: dict[str, Any], names: Collection[str | None], factors: Tensor | None
) -> PretrainedConfig:
    """The configuration of the model with these fields, names of tensors, and factors of rotation if any.

    Raises UserError when it is none of `ARCHITECTURES`, or rotates as lacuna does not know.
    """
    architecture = fields["general.architecture"]
    types = {theirs: ours for ours, theirs in ARCHITECTURES.items()}
    refuse(
        {f"it is a {architecture} model; known are {', '.join(types)}": architecture not in types}
    )
    about = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    settings = {ours: about[key] for key, ours in settings_of(architecture).items() if key in about}
    layers = settings.get("num_hidden_layers", 0)
    refuse({f"it claims {layers} layers, and has {len(names)} tensors": layers > len(names)})
    settings["vocab_size"] = len(fields["tokenizer.ggml.tokens"])
    settings["tie_word_embeddings"] = "output.weight" not in names
    settings |= {
        f"{name}_id": fields.get(f"tokenizer.ggml.{theirs}_id")
        for name, theirs in SPECIAL_TOKENS.items()
    }
    if architecture == "llama":
        settings |= {
            "attention_bias": "blk.0.attn_q.bias" in names,
            "mlp_bias": "blk.0.ffn_up.bias" in names,
        }
    part = settings["hidden_size"] // settings["num_attention_heads"]
    settings = {"num_key_value_heads": settings["num_attention_heads"], "head_dim": part} | settings
    # llama.cpp tells those whose queries are scaled otherwise, the largest, by their layers.
    is_largest = settings["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}.get(architecture)
    settings["query_pre_attn_scalar"] = part if is_largest else settings["head_dim"]
    unnamed = "linear" if about.keys() & {"rope.scaling.factor", "rope.scale_linear"} else "none"
    scaling = about.get("rope.scaling.type", unnamed)
    refuse({f"it scales positions ({scaling}), as lacuna cannot": scaling != "none"})
    bases = (about.get(f"rope.freq_base{which}", 10000.0) for which in ("", "_swa"))
    rope, near = ({"rope_type": "default", "rope_theta": base} for base in bases)
    both = {"full_attention": rope, "sliding_attention": near}
    settings["rope_parameters"] = both if architecture == "gemma3" else rope
    if isinstance(pattern := about.get("attention.sliding_window_pattern"), list):
        settings["layer_types"] = [
            "sliding_attention" if slides else "full_attention" for slides in pattern
        ]
    usual = AutoConfig.for_model(types[architecture])
    config = type(usual)(
        **{name: value for name, value in settings.items() if hasattr(usual, name)}
    )
    if factors is not None:
        config.rope_parameters |= _LLAMA3 | {"factor": round(factors.max().item(), 4)}
        expected = rope_factors(config)
        known = factors.shape == expected.shape and torch.allclose(factors, expected, rtol=1e-4)
        refuse({f"{ROPE_FACTORS} is not that of a Llama 3": not known})
    return config


def read_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer with these fields. Raises UserError when it is of a kind that lacuna does not know."""
    about = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    kind, pre, texts = about["model"], about.get("pre"), about["tokens"]
    refuse({f"it has a {kind} tokenizer; known are gpt2 and llama": kind not in ("gpt2", "llama")})
    unknown = kind == "gpt2" and pre not in PRE_TOKENIZERS
    refuse({f"it has the pre-tokenizer {pre}; known are {', '.join(PRE_TOKENIZERS)}": unknown})
    if (
        kind == "llama"
    ):  # where tokens of white space are kept as such, since they are looked for in raw text
        texts = [text if text.strip(" ") else BLANK * len(text) for text in texts]
    of: dict[int, list[str]] = {
        number: [] for number in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
    }
    for text, number in zip(texts, about["token_type"], strict=True):
        of[number].append(text)
    padding = {text for text in of[UNUSED] if text.startswith("[PAD")}
    tokens = {text: number for number, text in enumerate(texts) if text not in padding}
    named = {
        name: texts[about[f"{theirs}_id"]]
        for name, theirs in SPECIAL_TOKENS.items()
        if f"{theirs}_id" in about
    }
    if kind == "gpt2":
        merges = [tuple(merge.split(" ")) for merge in about["merges"]]
        backend = Tokenizer(models.BPE(tokens, merges, ignore_merges=pre in _WHOLE))
        backend.pre_tokenizer, backend.decoder = PRE_TOKENIZERS[pre], decoders.ByteLevel()
        backend.normalizer = normalizers.Sequence([normalizers.NFC()] * (pre == "qwen2"))
    else:
        scores = {text: about["scores"][number] for text, number in tokens.items()}
        scores |= {
            text: 1e9 - tokens[text] for text in of[USER_DEFINED]
        }  # which are found before any merge
        merges = generate_merges(tokens, scores, of[CONTROL] + of[UNKNOWN] + of[BYTE])
        unknown = named.get("unk_token", texts[0])
        backend = Tokenizer(
            models.BPE(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        begins = [normalizers.Prepend(BLANK)] * about.get("add_space_prefix", True)
        backend.normalizer = normalizers.Sequence([*begins, normalizers.Replace(" ", BLANK)])
        steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * len(begins))
    backend.add_special_tokens(
        [AddedToken(text, normalized=False) for text in of[CONTROL] + of[UNKNOWN]]
    )
    backend.add_tokens([AddedToken(text, normalized=False) for text in of[USER_DEFINED]])
    if about.get("add_bos_token", kind == "llama" or pre in _WHOLE):
        refuse(
            {"texts begin with a token that is not named as bos_token": "bos_token" not in named}
        )
        first = (named["bos_token"], tokens[named["bos_token"]])
        backend.post_processor = processors.TemplateProcessing(
            [first[0], "$A"], special_tokens=[first]
        )
    template = fields.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)
