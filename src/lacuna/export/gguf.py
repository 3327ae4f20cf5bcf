"""A trained model as one GGUF file, which llama.cpp and what is built on it run."""

import json
import math
import os
import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import explained, refuse
from lacuna.data import gguf as known
from lacuna.data.chat import end_of_turn
from lacuna.data.corpus import stdlib_files
from lacuna.model.architecture import attention_widths, head_dim

# Types of weights that the package gguf writes, and the program of llama.cpp that makes all others
# of one of them.
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
QUANTIZER = "llama-quantize"

_LARGEST = 65504.0  # of float16, in which all these types but BF16 have their numbers or scales

# What a configuration may say that does not change what the model computes when it is used.
_IDLE = re.compile(
    r".*_token_id|.*drop.*|use_cache|initializer_range|summary_.*|pretraining_tp|max_window_layers|model_type|_.*"
)
_REAL = re.compile(r".*(epsilon|capping|freq_base.*)")

# What tells pre-tokenizers apart: contractions, figures, marks, accents, scripts, white space.
# Composed, as NFC has it.
_PROBE = "I'm WE'LL o'Neil 1234567 x2y ½ ﬁn naïve don't...\n\n  go //\n/a HTMLPage iPhone\tहिन्दी 中文 🙂!!\r\n end  "
_PROBE_FILES = 10

_MARK = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")


def require(kind: str) -> None:
    """Raises UserError when what writes weights of this type is not installed."""
    known.gguf_package()
    refuse(
        {
            f"--type {kind}: the weights would go through 16 bits; choose F16 or BF16": kind.upper()
            == "F32"
        }
    )
    missing = kind not in TYPES and shutil.which(QUANTIZER) is None
    mend = f"install llama.cpp, or choose one of {', '.join(TYPES)}"
    refuse(
        {
            f"--type {kind} is left to llama.cpp's {QUANTIZER}, which is not installed; {mend}": missing
        }
    )


def export_gguf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: str, kind: str
) -> None:
    """Writes `model`, unsharded, to `file`, with weights of the type `kind`, one of `TYPES` or of llama-quantize's.

    The file appears whole or not at all. Raises UserError when GGUF or the type of weights cannot
    hold the model or its tokenizer.
    """
    unfinished, quantised = f"{file}.unfinished", f"{file}.quantised"
    written = kind if kind in TYPES else "BF16" if model.dtype == torch.bfloat16 else "F16"
    try:
        with explained(
            f"{file}: cannot be written", OSError, mend="make room, or choose another target"
        ):
            os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
            _write(model, tokenizer, unfinished, written)
        if kind != written:
            done = subprocess.run(
                [QUANTIZER, unfinished, quantised, kind], capture_output=True, errors="replace"
            )
            said = done.stderr.strip().rpartition("\n")[2]
            refuse({f"--type {kind}: {QUANTIZER} failed: {said}": done.returncode != 0})
            os.replace(quantised, unfinished)
        os.replace(unfinished, file)
    finally:
        for path in (unfinished, quantised):
            Path(path).unlink(missing_ok=True)


def _write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: str, kind: str
) -> None:
    """Writes a file, a tensor at a time."""
    gguf, config = known.gguf_package(), deepcopy(model.config)
    others = (
        f"no {config.model_type} model can be a GGUF file, only {', '.join(known.ARCHITECTURES)}"
    )
    refuse({others: config.model_type not in known.ARCHITECTURES})
    names, tensors = known.tensor_names(model, config), dict(model.named_parameters())
    homeless = [name for name, theirs in names.items() if theirs is None]
    refuse({f"GGUF has no place for {homeless[:1]} in a {config.model_type} model": homeless != []})
    fields = _model_fields(config) | _tokenizer_fields(tokenizer, model)
    if config.model_type == "llama" and config.rope_parameters["rope_type"] == "llama3":
        names["factors"], tensors["factors"] = known.ROPE_FACTORS, known.rope_factors(config)
    _check_model(config, known.read_config(fields, names.values(), tensors.get("factors")))
    _check_tokenizer(fields, tokenizer)
    fields |= {
        "general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{kind}"]),
        "general.quantization_version": 2,
    }
    writer = gguf.GGUFWriter(file, fields.pop("general.architecture"))
    for key, value in fields.items():
        of_value = (
            gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        )
        writer.add_key_value(key, value, of_value)
    types = {}
    for name, theirs in names.items():
        shape = known.converted(tensors[name].detach().to("meta"), theirs, config).shape
        types[name] = gguf.GGMLQuantizationType[_type(theirs, shape, kind)]
        size = math.prod(gguf.quant_shape_to_byte_shape(shape, types[name]))
        writer.add_tensor_info(theirs, shape, np.dtype(np.float32), size, types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, theirs in names.items():
        tensor = known.converted(tensors[name].detach().float(), theirs, config).contiguous()
        fits = types[name].name in ("F32", "BF16") or tensor.abs().max() <= _LARGEST
        refuse(
            {
                f"{name} has numbers above {_LARGEST:.0f}, which {kind} cannot hold; choose --type BF16": not fits
            }
        )
        writer.write_tensor_data(gguf.quantize(tensor.numpy(), types[name]))
    writer.close()


def _type(name: str, shape: torch.Size, kind: str) -> str:
    """The type of one tensor: `kind`, or a finer one where llama.cpp or the format needs it, or much depends on it."""
    if len(shape) == 1 or name == "position_embd.weight":
        return "F32"
    if kind.startswith("Q") and shape[-1] % 32:  # the length of a block that shares its scale
        return "F16"
    return (
        "Q8_0" if kind.startswith("Q") and name in ("token_embd.weight", "output.weight") else kind
    )


def _model_fields(config: PretrainedConfig) -> dict[str, Any]:
    """What a file says of the model. Settings that it has otherwise are changed in `config` to what it says."""
    architecture, slides = (
        known.ARCHITECTURES[config.model_type],
        config.model_type in ("gemma2", "gemma3_text"),
    )
    if (
        not slides
    ):  # llama.cpp attends to all there is, which is the same within the length of a window
        config.max_position_embeddings = min(
            filter(None, [*attention_widths(config), config.max_position_embeddings])
        )
        config.sliding_window = None
    if architecture == "gpt2":
        config.n_inner = config.n_inner or 4 * config.n_embd
    usual, keys = (
        type(config)(),
        known.settings_of(architecture),
    )  # one may have more than its class knows
    about = {key: getattr(config, ours) for key, ours in keys.items() if hasattr(usual, ours)}
    if rope := getattr(config, "rope_parameters", None):
        whole, near = rope.get("full_attention", rope), rope.get("sliding_attention", rope)
        about |= {"rope.freq_base": whole["rope_theta"], "rope.freq_base_swa": near["rope_theta"]}
        about |= dict.fromkeys(("rope.dimension_count", "attention.value_length"), head_dim(config))
    if slides:
        about["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config.layer_types
        ]
    about = {
        key: float(value) if _REAL.fullmatch(key) else value
        for key, value in about.items()
        if value is not None
    }
    return {"general.architecture": architecture} | {
        f"{architecture}.{key}": value for key, value in about.items()
    }


def _tokenizer_fields(tokenizer: PreTrainedTokenizerBase, of: PreTrainedModel) -> dict[str, Any]:
    """What a file says of the tokenizer `of` a model, and of where it stops.

    Raises UserError when llama.cpp has no such tokenizer.
    """
    rows, listed = of.config.vocab_size, of.generation_config.eos_token_id
    model = (
        json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        if tokenizer.is_fast
        else {"type": "slow"}
    )
    ids, ends = tokenizer.get_vocab(), end_of_turn(tokenizer)
    ends += [listed] if isinstance(listed, int) else listed or []
    refuse(
        {
            f"GGUF: the tokenizer is {model['type']}, but must be byte pair encoding (BPE)": model[
                "type"
            ]
            != "BPE",
            "GGUF: the tokenizer has no merges, but llama.cpp needs some": not model.get("merges"),
            f"GGUF: the tokenizer has tokens beyond the {rows} rows of the embedding": max(
                ids.values()
            )
            >= rows,
            "GGUF: the tokenizer has no token that ends a text, but llama.cpp needs one": not ends,
        }
    )
    normalizer, parting = (
        tokenizer.backend_tokenizer.normalizer,
        tokenizer.backend_tokenizer.pre_tokenizer,
    )
    probe = normalizer.normalize_str(_PROBE) if normalizer else _PROBE
    parts = parting.pre_tokenize_str(probe) if parting else [(probe, (0, len(probe)))]
    pre = [
        name
        for name, other in known.PRE_TOKENIZERS.items()
        if other.pre_tokenize_str(_PROBE) == parts
    ]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    texts, kinds = [f"[PAD{number}]" for number in range(rows)], [known.UNUSED] * rows
    added_tokens = tokenizer.added_tokens_decoder  # made anew whenever it is asked for
    for text, number in ids.items():
        added = added_tokens.get(number)
        kinds[number] = (
            known.NORMAL
            if added is None
            else known.CONTROL
            if added.special
            else known.USER_DEFINED
        )
        texts[number] = text
    about: dict[str, Any] = (
        {"model": "gpt2", "pre": pre[0], "merges": merges} if pre else {"model": "llama"}
    )
    if not pre:  # SentencePiece's way: of all neighbours whose whole is a token the best are joined
        ranks = {
            merge.replace(" ", ""): -float(rank) for rank, merge in reversed([*enumerate(merges)])
        }
        about["scores"] = [ranks.get(text, -float(len(merges))) for text in texts]
        about["add_space_prefix"] = parts[0][0].startswith(known.BLANK)
        for number, text in enumerate(texts):
            if re.fullmatch("<0x[0-9A-F]{2}>", text):
                kinds[number] = known.BYTE
            elif text == tokenizer.unk_token:
                kinds[number] = known.UNKNOWN
            elif kinds[number] == known.USER_DEFINED and not text.strip(known.BLANK):
                texts[number] = " " * len(text)
    begun, bare = (tokenizer("a", add_special_tokens=adds).input_ids for adds in (True, False))
    about |= {"tokens": texts, "token_type": kinds, "add_bos_token": begun[0] != bare[0]}
    about |= {
        f"{theirs}_id": getattr(tokenizer, f"{ours}_id")
        for ours, theirs in known.SPECIAL_TOKENS.items()
    }
    fields = {f"tokenizer.ggml.{key}": value for key, value in about.items() if value is not None}
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if (
        template
    ):  # the marks of what is trained are transformers' own: a comment leaves the same text
        fields["tokenizer.chat_template"] = _MARK.sub(r"{#\1 \2#}", template)
    return fields | dict(zip(known.ENDS, dict.fromkeys(ends), strict=False))


def _check_model(config: PretrainedConfig, read: PretrainedConfig) -> None:
    """Raises UserError unless the configuration that was `read` from the fields computes the same."""
    settings = sorted(type(config)().to_dict().keys() - PretrainedConfig().to_dict().keys())
    pairs = {
        name: (config.to_dict()[name], read.to_dict().get(name))
        for name in settings
        if not _IDLE.fullmatch(name)
    }
    pairs["head_dim"] = (head_dim(config), head_dim(read))  # which some have and do not declare
    lost = ", ".join(f"{name} = {meant}" for name, (meant, kept) in pairs.items() if meant != kept)
    refuse({f"GGUF cannot hold {lost} of the model": lost != ""})


def _check_tokenizer(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError unless the tokenizer that is read from the fields makes the same tokens of texts."""
    texts = [
        _PROBE,
        *(
            Path(file).read_text(errors="replace")
            for file in stdlib_files()["validation"][:_PROBE_FILES]
        ),
    ]
    if fields["tokenizer.ggml.model"] == "gpt2":
        texts.append("".join(f" {token}\nx" for token in tokenizer.get_added_vocab()))
    same = tokenizer(texts).input_ids == known.read_tokenizer(fields)(texts).input_ids
    ways = f"is not of {', '.join(known.PRE_TOKENIZERS)} or SentencePiece, or has added tokens that take in blanks"
    refuse(
        {f"GGUF: llama.cpp would part texts otherwise than the tokenizer, which {ways}": not same}
    )
