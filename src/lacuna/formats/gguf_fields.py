"""What a GGUF file says of a model and its tokenizer, checked by reading it back."""

import json
import re
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import UserError
from lacuna.data.chat import end_of_turn
from lacuna.data.corpus import stdlib_files
from lacuna.data.gguf import ARCHITECTURES, settings_of
from lacuna.data.gguf_tokenizer import (
    BLANK,
    BYTE,
    CONTROL,
    ENDS,
    NORMAL,
    PRE_TOKENIZERS,
    SPECIAL_TOKENS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_tokenizer,
)
from lacuna.model.architecture import head_dim
from lacuna.model.flops import attention_widths

# What a configuration may say that does not change what the model computes when it is used.
_IDLE = re.compile(
    r".*_token_id|.*drop.*|use_cache|initializer_range|summary_.*|pretraining_tp"
    r"|max_window_layers|model_type|_.*"
)
_REAL = re.compile(r".*(epsilon|capping|freq_base.*)")

# What tells pre-tokenizers apart: contractions, figures, marks, accents, scripts, white space.
# Characters are composed, as NFC composes them.
_PROBE = (
    "I'm WE'LL o'Neil 1234567 x2y ½ ﬁn naïve don't...\n\n  go //\n/a HTMLPage iPhone\t"
    "हिन्दी 中文 🙂!!\r\n end  "
)
_PROBE_FILES = 10

_MARK = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")


def model_fields(config: PretrainedConfig) -> dict[str, Any]:
    """What a file says of the model.

    Where a file cannot hold a setting as it is, `config` is changed to what the file says.
    """
    architecture = ARCHITECTURES[config.model_type]
    slides = config.model_type in ("gemma2", "gemma3_text")
    if not slides:
        # llama.cpp attends to all tokens, which makes no difference within the length of a window.
        widths = [*attention_widths(config), config.max_position_embeddings]
        config.max_position_embeddings = min(filter(None, widths))
        config.sliding_window = None
    if architecture == "gpt2":
        config.n_inner = config.n_inner or 4 * config.n_embd
    usual = type(config)()  # a configuration may have more than its class knows
    about = {
        key: getattr(config, ours)
        for key, ours in settings_of(architecture).items()
        if hasattr(usual, ours)
    }
    if rope := getattr(config, "rope_parameters", None):
        about["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
        about["rope.freq_base_swa"] = rope.get("sliding_attention", rope)["rope_theta"]
        about["rope.dimension_count"] = head_dim(config)
        about["attention.value_length"] = head_dim(config)
    if slides:
        kinds = config.layer_types
        about["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    fields: dict[str, Any] = {"general.architecture": architecture}
    for key, value in about.items():
        if value is not None:
            fields[f"{architecture}.{key}"] = float(value) if _REAL.fullmatch(key) else value
    return fields


def tokenizer_fields(tokenizer: PreTrainedTokenizerBase, of: PreTrainedModel) -> dict[str, Any]:
    """What a file says of the tokenizer `of` a model, and of where it stops.

    Raises `UserError` when llama.cpp has no such tokenizer.
    """
    rows = of.config.vocab_size
    listed = of.generation_config.eos_token_id
    ends = end_of_turn(tokenizer)
    ends += [listed] if isinstance(listed, int) else listed or []
    model = _byte_pairs(tokenizer, rows)
    if not ends:
        raise UserError(
            "GGUF: the tokenizer has no token that ends a text, but llama.cpp needs one."
        )
    parts = _probe_parts(tokenizer)
    pre = [
        name for name, other in PRE_TOKENIZERS.items() if other.pre_tokenize_str(_PROBE) == parts
    ]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    texts, kinds = _texts_and_kinds(tokenizer, rows)
    about: dict[str, Any]
    if pre:
        about = {"model": "gpt2", "pre": pre[0], "merges": merges}
    else:
        about = {"model": "llama", "add_space_prefix": parts[0][0].startswith(BLANK)}
        about["scores"] = _token_scores(texts, merges)
        _mark_as_sentence_piece(texts, kinds, tokenizer.unk_token)
    begun, bare = (tokenizer("a", add_special_tokens=adds).input_ids for adds in (True, False))
    about |= {"tokens": texts, "token_type": kinds, "add_bos_token": begun[0] != bare[0]}
    for ours, theirs in SPECIAL_TOKENS.items():
        about[f"{theirs}_id"] = getattr(tokenizer, f"{ours}_id")
    fields = {f"tokenizer.ggml.{key}": value for key, value in about.items() if value is not None}
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if template:
        # Only transformers knows the marks of trained parts: comments leave the text the same.
        fields["tokenizer.chat_template"] = _MARK.sub(r"{#\1 \2#}", template)
    return fields | dict(zip(ENDS, dict.fromkeys(ends), strict=False))


def _byte_pairs(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Any]:
    """The byte pairs that a tokenizer is made of.

    Raises `UserError` for a kind that llama.cpp does not have, or for more tokens than `rows`.
    """
    model: dict[str, Any] = {"type": "slow"}
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] != "BPE":
        raise UserError(
            f"GGUF: the tokenizer is {model['type']}, but must be byte pair encoding (BPE)."
        )
    if not model.get("merges"):
        raise UserError("GGUF: the tokenizer has no merges, but llama.cpp needs some.")
    if max(tokenizer.get_vocab().values()) >= rows:
        raise UserError(f"GGUF: the tokenizer has tokens beyond the {rows} rows of the embedding.")
    return model


def _probe_parts(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, tuple[int, int]]]:
    """The parts of the probe within which the tokenizer merges."""
    backend = tokenizer.backend_tokenizer
    probe = backend.normalizer.normalize_str(_PROBE) if backend.normalizer else _PROBE
    if not backend.pre_tokenizer:
        return [(probe, (0, len(probe)))]
    parts: list[tuple[str, tuple[int, int]]] = backend.pre_tokenizer.pre_tokenize_str(probe)
    return parts


def _texts_and_kinds(tokenizer: PreTrainedTokenizerBase, rows: int) -> tuple[list[str], list[int]]:
    """The text and the kind of the token of each row of the embedding."""
    texts = [f"[PAD{number}]" for number in range(rows)]
    kinds = [UNUSED] * rows
    added_tokens = tokenizer.added_tokens_decoder  # made anew whenever it is asked for
    for text, number in tokenizer.get_vocab().items():
        added = added_tokens.get(number)
        if added is None:
            kinds[number] = NORMAL
        else:
            kinds[number] = CONTROL if added.special else USER_DEFINED
        texts[number] = text
    return texts, kinds


def _token_scores(texts: list[str], merges: list[str]) -> list[float]:
    """The score of each token: SentencePiece joins the neighbours that make the best token."""
    ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed([*enumerate(merges)])}
    return [ranks.get(text, -float(len(merges))) for text in texts]


def _mark_as_sentence_piece(texts: list[str], kinds: list[int], unknown: str | None) -> None:
    """Changes kinds and texts of tokens, in place, to those that SentencePiece would have."""
    for number, text in enumerate(texts):
        if re.fullmatch("<0x[0-9A-F]{2}>", text):
            kinds[number] = BYTE
        elif text == unknown:
            kinds[number] = UNKNOWN
        elif kinds[number] == USER_DEFINED and not text.strip(BLANK):
            texts[number] = " " * len(text)


def check_model(config: PretrainedConfig, read: PretrainedConfig) -> None:
    """Raises `UserError` unless the configuration `read` from the fields computes the same."""
    settings = sorted(type(config)().to_dict().keys() - PretrainedConfig().to_dict().keys())
    pairs = {
        name: (config.to_dict()[name], read.to_dict().get(name))
        for name in settings
        if not _IDLE.fullmatch(name)
    }
    pairs["head_dim"] = (head_dim(config), head_dim(read))  # which some have and do not declare
    lost = ", ".join(f"{name} = {meant}" for name, (meant, kept) in pairs.items() if meant != kept)
    if lost:
        raise UserError(f"GGUF cannot hold {lost} of the model.")


def check_tokenizer(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `UserError` unless the tokenizer in the fields makes the same tokens of texts."""
    texts = [_PROBE]
    for file in stdlib_files()["validation"][:_PROBE_FILES]:
        texts.append(Path(file).read_text(errors="replace"))
    if fields["tokenizer.ggml.model"] == "gpt2":
        texts.append("".join(f" {token}\nx" for token in tokenizer.get_added_vocab()))
    if tokenizer(texts).input_ids != read_tokenizer(fields)(texts).input_ids:
        raise UserError(
            f"GGUF: llama.cpp would part texts otherwise than the tokenizer, which is not of "
            f"{', '.join(PRE_TOKENIZERS)} or SentencePiece, or has added tokens that "
            f"take in blanks."
        )
