"""Tiny models of the families of GGUF, with tokenizers trained on Python's own source."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from lacuna.data.corpus import stdlib_files
from tiny import random_model

END, ASK, ANSWERED = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = 640  # more than any of the tokenizers has tokens

_SIZES = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "sentencepiece", {}),
    "llama3": ("llama", "llama-bpe", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "smollm": ("llama", "smollm", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "mistral": ("mistral", "sentencepiece", {"head_dim": 32, "sliding_window": 256}),
    "mistral_nemo": ("mistral", "tekken", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen2", {"head_dim": 128}),
    "gemma": ("gemma", "gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", "gemma", {"head_dim": 256, "sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        "gemma",
        {"head_dim": 256, "sliding_window": 8, "num_hidden_layers": 6},
    ),
    "gpt2": ("gpt2", "gpt-2", {"max_position_embeddings": 1024}),
}
"""Name -> transformers' model type, the tokenizer, and settings."""

_SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def python_source(files: int) -> list[str]:
    """The text of some files of the standard library that no tokenizer was trained on."""
    return [
        Path(file).read_text(errors="replace") for file in stdlib_files()["validation"][-files:]
    ]


def tiny_gguf_model(family: str, **changes: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model of the family with random weights, in float32, and its tokenizer."""
    model_type, tokenizer, settings = FAMILIES[family]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    attention = "eager" if family == "gemma2" else "sdpa"
    model = random_model(
        AutoConfig.for_model(model_type, **_SIZES | ends | settings | changes), attention
    )
    return model, tokenizer_like(tokenizer)


@lru_cache
def tokenizer_like(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that splits texts as that kind does.

    It has ChatML's template and tokens, and one added word.
    """
    texts = [Path(file).read_text(errors="replace") for file in stdlib_files()["train"][::60]]
    if kind in ("sentencepiece", "gemma"):
        backend = _sentencepiece(texts, prefix=kind == "sentencepiece")
    else:
        backend = _byte_level(texts, kind)
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (END, ASK, ANSWERED)]
    )
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    names = {"eos_token": END, "chat_template": CHATML}
    if kind in ("sentencepiece", "gemma", "llama-bpe"):
        backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
        first = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=first)
        names["bos_token"] = "<s>"
    if kind in ("sentencepiece", "gemma"):
        names["unk_token"] = "<unk>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def _byte_level(texts: list[str], kind: str) -> Tokenizer:
    backend = Tokenizer(models.BPE(ignore_merges=kind in ("llama-bpe", "tekken")))
    if kind == "gpt-2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "smollm":
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    else:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def _sentencepiece(texts: list[str], prefix: bool) -> Tokenizer:
    """Returns a tokenizer like Llama 2's, or, without the blank before a text, like Gemma's.

    Any pair may merge whose whole is a token.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=350, show_progress=False, limit_alphabet=90)
    )
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(trained.get_vocab(), key=trained.token_to_id),
    ]
    tokens = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = generate_merges(
        {piece: tokens[piece] for piece in tokens if not piece.startswith("<")}
    )
    backend = Tokenizer(
        models.BPE(tokens, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    blank = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), blank]) if prefix else blank
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *[decoders.Strip(" ", 1, 0)] * prefix])
    backend.add_special_tokens([AddedToken("<unk>", special=True, normalized=False)])
    return backend
