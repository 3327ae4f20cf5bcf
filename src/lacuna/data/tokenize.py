"""Text to tokens: the tokenizer, and one document of a record."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lacuna.config import UserError
from lacuna.data import corpus

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """One document: int32 tokens [n], the end of text among them, and its text's UTF-8 bytes (nan: unknown)."""

    tokens: np.ndarray
    text_bytes: float


@dataclass
class BrokenRecords:
    """Counts unreadable records and stops the run when there are more than `limit`.

    A record that comes again in a later epoch, or to another reader, is counted once.
    """

    limit: int
    places: list[str] = field(default_factory=list)
    _taken: int = 0
    _reported: bool = False

    def add(self, place: str) -> None:
        """Raises UserError with the first few places when there are too many."""
        if place in self.places:
            return
        self.places.append(place)
        if len(self.places) > self.limit:
            raise UserError(
                f"more than {self.limit} unreadable records, the first: {'; '.join(self.places[:3])}; "
                "mend the data, or raise data.max_broken_records to skip them"
            )

    def report(self) -> None:
        """Warn, once, that there are some."""
        if self.places and not self._reported:
            self._reported = True
            count, first = len(self.places), "; ".join(self.places[:3])
            _LOG.warning("%d unreadable records are left out so far, more are skipped silently: %s", count, first)

    def take_new(self) -> tuple[str, ...]:
        """The places added since the last call."""
        new, self._taken = tuple(self.places[self._taken :]), len(self.places)
        return new


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hub id or folder, or the built-in one named python-stdlib.

    Raises UserError when there is none of that name.
    """
    if name_or_path == corpus.NAME:
        return corpus.stdlib_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"no tokenizer can be loaded from {name_or_path} ({reason}); set model.tokenizer_path to a Hub id, "
            f"to a folder that holds a tokenizer, or to {corpus.NAME}"
        ) from error


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides which tokens a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content["truncation"] = content["padding"] = None  # set anew by every call
    else:
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), repr(tokenizer.init_kwargs)]
    text = json.dumps([content, tokenizer.eos_token_id], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def tokenize_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each text, int32: as its tokenizer's post-processor has them, with one end of text at the end."""
    if tokenizer.is_fast:  # around transformers' own call, which also tracks offsets: a third faster
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        batch = [encoding.ids for encoding in backend.encode_batch_fast(list(texts))]
    else:
        batch = tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    for tokens in batch:
        if end is not None and (not tokens or tokens[-1] != end):
            tokens.append(end)
    return [np.array(tokens, dtype=np.int32) for tokens in batch]


def checked_tokens(tokens: Any, vocabulary: int, place: str) -> np.ndarray:
    """Tokens that came ready-made, int32. Raises UserError when the tokenizer does not know one of them."""
    array = np.asarray(tokens, dtype=np.int64)
    if array.size and not 0 <= array.min() <= array.max() < vocabulary:
        raise UserError(
            f"{place}: holds token {array.max() if array.min() >= 0 else array.min()}, but the tokenizer has only "
            f"{vocabulary}; the data was made with another tokenizer (model.tokenizer_path)"
        )
    return array.astype(np.int32)


def document_of(
    value: Any, place: str, pretokenised: bool, tokenizer: PreTrainedTokenizerBase, broken: BrokenRecords
) -> Document | None:
    """The document of a record's value; None when it is empty, or broken, which is counted."""
    if not isinstance(value, list if pretokenised else str):
        broken.add(place)
        return None
    if not value:
        return None
    if pretokenised:
        return Document(checked_tokens(value, len(tokenizer), place), float("nan"))
    return Document(tokenize_texts(tokenizer, [value])[0], float(len(value.encode())))
