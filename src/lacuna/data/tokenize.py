"""Text to tokens: the tokenizer, and one document of a record."""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets.fingerprint import Hasher
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lacuna.config import UserError
from lacuna.data import corpus
from lacuna.data.files import BROKEN
from lacuna.data.sources import Documents

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
    _reported: bool = False

    def add(self, *places: str) -> None:
        """Raises UserError with the first few places when there are too many."""
        self.places += [place for place in places if place not in self.places]
        if len(self.places) > self.limit:
            raise UserError(
                f"more than {self.limit} unreadable records, the first: {'; '.join(self.places[:3])}; "
                "mend the data, or raise data.max_broken_records to skip them"
            )

    def report(self) -> None:
        """Warn, once, that there are some."""
        if self.places and not self._reported:
            self._reported = True
            _LOG.warning("unreadable records are left out, further ones silently: %s", "; ".join(self.places[:3]))


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
    return Hasher.hash(json.dumps([content, tokenizer.eos_token_id], sort_keys=True))


def tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """The tokens of a text, int32: as its tokenizer's post-processor has them, with one end of text at the end."""
    if tokenizer.is_fast:  # around transformers' own call, which also tracks offsets: a third faster
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        tokens = backend.encode_batch_fast([text])[0].ids
    else:
        tokens = tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"]
    if tokenizer.eos_token_id not in (None, *tokens[-1:]):
        tokens.append(tokenizer.eos_token_id)
    return np.array(tokens, dtype=np.int32)


def document_of(
    source: Documents, record: dict[str, Any], place: str, tokenizer: PreTrainedTokenizerBase, broken: BrokenRecords
) -> Document | None:
    """The document of a record found at `place` in a source; None when it is empty, or broken, which is counted.

    Raises UserError when it came as tokens of which the tokenizer does not know one, or too many were broken.
    """
    value, place = record[source.column], record.get(BROKEN) or f"{source.name}, {place}"
    pretokenised = source.column == "input_ids"
    if not isinstance(value, list if pretokenised else str):
        broken.add(place)
        return None
    if not value:
        return None
    if not pretokenised:
        return Document(tokenize_text(tokenizer, value), float(len(value.encode())))
    lowest, highest = min(value), max(value)
    if lowest < 0 or highest >= len(tokenizer):
        raise UserError(
            f"{place}: holds token {lowest if lowest < 0 else highest}, but the tokenizer has only {len(tokenizer)}; "
            "the data was made with another tokenizer (model.tokenizer_path)"
        )
    return Document(np.array(value, dtype=np.int32), float("nan"))
