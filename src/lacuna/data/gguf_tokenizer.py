"""Tokenizers in GGUF files, rebuilt with the package `tokenizers` from llama.cpp's tables."""

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
)
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from lacuna.config import UserError

# transformers' names of special tokens -> llama.cpp's.
SPECIAL_TOKENS = {
    "bos_token": "bos_token",
    "eos_token": "eos_token",
    "unk_token": "unknown_token",
    "pad_token": "padding_token",
}
ENDS = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
BLANK = "▁"


def _splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)|\p{{N}}"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)

# llama.cpp's name of a way to split texts into the parts within which a byte-level tokenizer merges
# -> what splits texts so.
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "llama-bpe": _splitter(_WORDS + "{1,3}" + _OTHERS),
    "qwen2": _splitter(_WORDS + _OTHERS),
    "tekken": _splitter(_CASED + _OTHERS.replace("[\\r\\n]*", "[\\r\\n/]*")),
}
# With these, llama.cpp leaves a part that is itself a token as it is, and by default puts a token
# at the beginning of a text.
_WHOLE = {"llama-bpe", "tekken"}


def read_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that these fields of a file describe.

    Raises `UserError` when it is of a kind that lacuna does not know.
    """
    about = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    kind = about["model"]
    pre = about.get("pre")
    texts = about["tokens"]
    if kind not in ("gpt2", "llama"):
        raise UserError(f"it has a {kind} tokenizer; known are gpt2 and llama.")
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        raise UserError(f"it has the pre-tokenizer {pre}; known are {', '.join(PRE_TOKENIZERS)}.")
    if kind == "llama":
        # A token of blanks alone keeps them in the file, because it is looked for in raw text.
        texts = [text if text.strip(" ") else BLANK * len(text) for text in texts]
    of_kind = _texts_by_kind(texts, about["token_type"])
    padding = {text for text in of_kind[UNUSED] if text.startswith("[PAD")}
    tokens = {text: number for number, text in enumerate(texts) if text not in padding}
    named = {
        name: texts[about[f"{theirs}_id"]]
        for name, theirs in SPECIAL_TOKENS.items()
        if f"{theirs}_id" in about
    }
    if kind == "gpt2":
        backend = _byte_level(about, tokens)
    else:
        backend = _sentence_piece(about, tokens, of_kind, named.get("unk_token", texts[0]))
    special = of_kind[CONTROL] + of_kind[UNKNOWN]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    added = of_kind[USER_DEFINED]
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    if about.get("add_bos_token", kind == "llama" or pre in _WHOLE):
        if "bos_token" not in named:
            raise UserError("texts begin with a token that is not named as bos_token.")
        first = (named["bos_token"], tokens[named["bos_token"]])
        backend.post_processor = processors.TemplateProcessing(
            [first[0], "$A"], special_tokens=[first]
        )
    template = fields.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)


def _texts_by_kind(texts: list[str], kinds: list[int]) -> dict[int, list[str]]:
    """The texts of the tokens of each kind."""
    found: dict[int, list[str]] = {
        kind: [] for kind in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
    }
    for text, kind in zip(texts, kinds, strict=True):
        found[kind].append(text)
    return found


def _byte_level(about: dict[str, Any], tokens: dict[str, int]) -> Tokenizer:
    """A tokenizer of bytes, which merges in the order that the file has."""
    pre = about["pre"]
    merges = [tuple(merge.split(" ")) for merge in about["merges"]]
    backend = Tokenizer(models.BPE(tokens, merges, ignore_merges=pre in _WHOLE))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.Sequence([normalizers.NFC()] * (pre == "qwen2"))
    return backend


def _sentence_piece(
    about: dict[str, Any], tokens: dict[str, int], of_kind: dict[int, list[str]], unknown: str
) -> Tokenizer:
    """A tokenizer of SentencePiece's kind, whose merges follow from the scores of its tokens."""
    scores = {text: about["scores"][number] for text, number in tokens.items()}
    # Tokens that the user added are found before any merge.
    scores |= {text: 1e9 - tokens[text] for text in of_kind[USER_DEFINED]}
    unmerged = of_kind[CONTROL] + of_kind[UNKNOWN] + of_kind[BYTE]
    merges = generate_merges(tokens, scores, unmerged)
    backend = Tokenizer(
        models.BPE(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    begins = [normalizers.Prepend(BLANK)] * about.get("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([*begins, normalizers.Replace(" ", BLANK)])
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * len(begins))
    return backend
