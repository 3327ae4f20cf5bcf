"""Documents: what records become, and what rows are made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

# Where a part of a stream stood at the start of a block, enough to read on from there: documents
# passed over all epochs, those of them before this one, and the dataset's own state (None at the
# start of an epoch).
Snapshot = tuple[int, int, dict[str, Any] | None]
BEGINNING: Snapshot = (0, 0, None)

# A record, its place in the source, and the start of the block that it came in.
PlacedRecord = tuple[dict[str, Any], str, Snapshot]


@dataclass(frozen=True)
class Document:
    """One document: a text, a conversation, or sequences that are compared with each other.

    Attributes:
        tokens: int32 or uint16 [n], the end of text among them.
        text_bytes: the UTF-8 bytes of its text; nan where nobody knows.
        broken: the place where it was found, if it is unreadable and so has no tokens.
        trained: bool [n], whether a token is to be predicted; None means that all are.
        columns: by name [n] or [n, k], what else is known of each token as the target of a
            prediction, such as a weight.
        ends: where each of its sequences ends; empty where the document is a single sequence.
        sequence_columns: by name one value for each of its sequences.
    """

    tokens: np.ndarray
    text_bytes: float
    broken: str | None = None
    trained: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    sequence_columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Where each of its sequences begins and ends."""
        return list(pairwise((0, *(self.ends or (len(self.tokens),)))))


@dataclass(frozen=True)
class Span:
    """A part of a document in a row: its tokens from `start` to `stop`, or to its end.

    `source` is the number of the source that the document comes from.
    """

    document: Document
    source: int
    start: int
    stop: int

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of the part."""
        return self.document.tokens[self.start : self.stop]

    @property
    def trained(self) -> np.ndarray:
        """Whether each token is to be predicted, bool; the first of a sequence never is."""
        trained = np.ones(len(self.tokens), dtype=bool)
        if self.document.trained is not None:
            trained &= self.document.trained[self.start : self.stop]
        trained[:1] = False
        for begin, _ in self.document.bounds:
            if self.start <= begin < self.start + len(trained):
                trained[begin - self.start] = False
        return trained
