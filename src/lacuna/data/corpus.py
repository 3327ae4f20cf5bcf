"""A corpus and a tokenizer that every Python brings along, so that a first run needs no download."""

import hashlib
import logging
import os
import platform
import shutil
import sysconfig
import tempfile
import zlib
from pathlib import Path

from transformers import PreTrainedTokenizerFast

NAME = "python-stdlib"
"""The dataset and the tokenizer of this name are the ones of this module."""

_LOG = logging.getLogger(__name__)
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__"}
_END = "<|endoftext|>"
_VOCABULARY = 4096
_VALIDATION_PART = 20
_TRAINING_BYTES = 4_000_000


def stdlib_files(split: str) -> list[Path]:
    """The standard library's source files of a split, sorted; about one in twenty is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in root.rglob("*.py") if not _LEFT_OUT.intersection(p.relative_to(root).parts))
    return [p for p in paths if _split_of(p.relative_to(root).as_posix()) == split]


def stdlib_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 4,096 tokens trained on the train split, kept in lacuna's cache folder."""
    texts = [path.read_bytes() for path in stdlib_files("train")]
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
    folder = cache_folder() / f"{NAME}-tokenizer-{platform.python_version()}-{_VOCABULARY}-{digest}"
    if not folder.is_dir():
        _LOG.info("training the %s tokenizer, once, into %s", NAME, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent))
        _train_tokenizer(texts).save_pretrained(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(temporary)  # another rank was faster
    return PreTrainedTokenizerFast.from_pretrained(folder)


def cache_folder() -> Path:
    """Where lacuna keeps what can be made again: $LACUNA_CACHE, else $XDG_CACHE_HOME/lacuna, else ~/.cache/lacuna."""
    chosen = os.environ.get("LACUNA_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lacuna"


def _split_of(relative_path: str) -> str:
    return "train" if zlib.crc32(relative_path.encode()) % _VALIDATION_PART else "validation"


def _train_tokenizer(texts: list[bytes]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=[_END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    step = max(1, sum(map(len, texts)) // _TRAINING_BYTES)
    tokenizer.train_from_iterator((text.decode(errors="replace") for text in texts[::step]), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END, bos_token=None)
