"""A corpus that every Python brings along, and its tokenizer: a first run needs no download."""

import hashlib
import os
import sysconfig
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from lacuna.config import logger
from lacuna.config.documents import BUILT_IN
from lacuna.data.cache import made_once

_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "__pycache__",
}
_END = "<|endoftext|>"
_VOCABULARY = 4096
_VALIDATION_PART = 20
_TRAINING_BYTES = 4_000_000


def stdlib_files() -> dict[str, list[str]]:
    """The standard library's source files by split, sorted; every twentieth is for validation."""
    found = []
    for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = set(inner) - _LEFT_OUT  # the walk then does not enter these folders
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [str(path) for path in sorted(found)]
    train = [file for number, file in enumerate(files) if number % _VALIDATION_PART]
    return {"train": train, "validation": files[::_VALIDATION_PART]}


def stdlib_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 4,096 tokens, trained once on the train split and kept in the caches."""
    texts = [Path(file).read_bytes() for file in stdlib_files()["train"]]
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]

    def train(file: str) -> None:
        logger.info("training the %s tokenizer, once, into %s", BUILT_IN, Path(file).parent)
        step = max(1, sum(map(len, texts)) // _TRAINING_BYTES)
        sample = [text.decode(errors="replace") for text in texts[::step]]
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(
            sample, _VOCABULARY, min_frequency=0, show_progress=False, special_tokens=[_END]
        )
        trained.save(file)

    file = made_once(f"{BUILT_IN}-{_VOCABULARY}-{digest}.json", train)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_file=str(file), eos_token=_END, pad_token=_END
    )
    return tokenizer
