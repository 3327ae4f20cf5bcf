"""Texts in files, and a tokenizer of bytes."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 256
"""The id of the end of text; every other id is a byte of the byte-level alphabet."""


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """One token per byte, then an end of text; no beginning of text."""
    vocabulary = {
        letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocabulary | {"<end>": END}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def write_lines(path: Path, texts: list[str]) -> Path:
    """A file of JSON lines with a text each."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
