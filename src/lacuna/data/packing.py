"""Pieces of documents to rows of tokens: inputs, labels, positions and the bounds attention keeps to."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Span:
    """A run of one document's tokens inside one row.

    `following` is the document's next token, or IGNORED where the document ends; `text_bytes` the UTF-8 bytes of
    the text that these tokens came from (nan when only tokens are known).
    """

    tokens: np.ndarray
    following: int
    source: int
    text_bytes: float


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank; B sequences of T tokens; tensors on the CPU.

    Attributes:
        input_ids: int64 [B, T].
        labels: int64 [B, T], already shifted: the target of position t; -100 where nothing is trained.
        position_ids: int64 [B, T], from 0 in each piece (from 0 in each row when documents are not masked).
        cu_seqlens: int32 [n + 1], bounds of the pieces in the flattened B * T order; every row end is one.
        max_seqlen: tokens in the longest piece.
        tokens: input tokens that are not padding.
        trained_tokens: labels that are not -100.
        text_bytes: UTF-8 bytes of the text these tokens came from (nan when only tokens are known).
        source_tokens: real tokens from each source, in the order of the configuration.
        broken_records: places of the records found broken while this batch was made.
        state: what `Loader.state_dict` needs; nobody else's business.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    tokens: int
    trained_tokens: int
    text_bytes: float
    source_tokens: tuple[int, ...]
    broken_records: tuple[str, ...] = ()
    state: Any = None

    def to(self, device: torch.device | str) -> "Batch":
        """Copy the tensors to a device, without waiting where they are in pinned memory."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Called by torch's DataLoader, which knows how to pin anything that has this method."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, function: Any) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: function(v) for k, v in values.items() if isinstance(v, Tensor)})


@dataclass(frozen=True)
class Packing:
    """How rows are laid out; see the settings of the same names.

    `piece_length` is training.context_len under training.varlen and None otherwise; `padding` the id that fills
    rows with too few tokens (only validation has them).
    """

    row_length: int
    piece_length: int | None
    document_mask: bool
    predict_across_documents: bool
    sources: int
    padding: int = 0

    def batch(self, rows: Sequence[Sequence[Span]]) -> Batch:
        """Lay out rows, each a sequence of spans of at most `row_length` tokens together."""
        shape = (len(rows), self.row_length)
        input_ids = np.full(shape, self.padding, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        bounds = [np.zeros(1, dtype=np.int64)]
        source_tokens = [0] * self.sources
        for number, spans in enumerate(rows):
            _fill_row(input_ids[number], labels[number], spans, self.predict_across_documents)
            ends = self._piece_ends(spans)
            starts = np.concatenate(([0], ends[:-1]))
            positions[number] = np.arange(self.row_length) - np.repeat(starts, ends - starts)
            bounds.append(ends + number * self.row_length)
            for span in spans:
                source_tokens[span.source] += len(span.tokens)
        cu_seqlens = np.concatenate(bounds)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
            max_seqlen=int(np.diff(cu_seqlens).max()),
            tokens=sum(source_tokens),
            trained_tokens=int((labels != IGNORED).sum()),
            text_bytes=float(sum(span.text_bytes for spans in rows for span in spans)),
            source_tokens=tuple(source_tokens),
        )

    def _piece_ends(self, spans: Sequence[Span]) -> np.ndarray:
        ends: list[int] = []
        if self.document_mask:
            end = 0
            for span in spans:
                start, end = end, end + len(span.tokens)
                if self.piece_length is not None:
                    ends.extend(range(start + self.piece_length, end, self.piece_length))
                ends.append(end)
        if not ends or ends[-1] < self.row_length:
            ends.append(self.row_length)
        return np.array(ends, dtype=np.int64)


def _fill_row(input_ids: np.ndarray, labels: np.ndarray, spans: Sequence[Span], across: bool) -> None:
    end = 0
    for number, span in enumerate(spans):
        start, end = end, end + len(span.tokens)
        input_ids[start:end] = span.tokens
        labels[start : end - 1] = span.tokens[1:]
        following = span.following
        if following == IGNORED and across and number + 1 < len(spans):
            following = int(spans[number + 1].tokens[0])
        labels[end - 1] = following
