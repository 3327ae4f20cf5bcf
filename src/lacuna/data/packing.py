"""Rows to batches: the inputs, labels, positions and bounds of a micro-batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from lacuna.config import UserError
from lacuna.config.row_form import RowForm
from lacuna.data.document import Span

IGNORED = -100
# Rows are rounded up to a multiple of this: many different lengths would need many kernels.
_ROUNDED = 64


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank; B sequences of T tokens; tensors on the CPU.

    Attributes:
        columns: by name [B, T] or [B, T, k], a value or some values of each token. Every batch has
            input_ids: int64;
            labels: int64, already shifted: the target of position t; -100 where nothing is trained;
            position_ids: int64, from 0 in each piece (in each row if documents are not masked);
            real: bool, whether a token is one of a document, and not padding.
            With preferences also
            sequence: int64, the number in the batch of the sequence that a token is of; 0 for
            padding.
            What documents know of their tokens lies beside the labels; 0 where nothing is trained.
        counts: by name, what is summed over micro-batches and ranks. Every batch has
            tokens: input tokens that are not padding;
            trained_tokens: labels that are not -100;
            text_bytes: UTF-8 bytes of the text that the tokens came from; nan if only the tokens
            are known;
            source_0 and so on: tokens from each source, in the order of the configuration.
            With preferences also
            pairs: documents, which have two sequences each;
            sequences: answers that are judged, which mismatched ones are not.
        cu_seqlens: int32 [n + 1], bounds of the pieces in the flattened B * T order; every row end
            is one.
        max_seqlen: tokens in the longest piece.
        sequence_columns: by name float32 [sequences], a value of each sequence that has a number in
            the column `sequence`. With preferences
            chosen: 1 if it is wanted, 0 if it is not;
            mismatched, for kto alone: 1 if its answer is one to another prompt.
        own_columns: by name [B, T', ...], what this rank computed for its share of the tokens, on
            its device.
    """

    columns: dict[str, Tensor]
    counts: dict[str, float]
    cu_seqlens: Tensor
    max_seqlen: int
    sequence_columns: dict[str, Tensor] = field(default_factory=dict)
    own_columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        """[B, T]"""
        return self.columns["input_ids"].shape


# Spans, each with the place of its first token where all rows lie one after the other.
_Placed = list[tuple[Span, int]]


def pack(
    rows: Sequence[Sequence[Span]],
    form: RowForm,
    sources: int,
    padding: int,
    kinds: Mapping[str, np.ndarray] | None = None,
) -> Batch:
    """Lays out rows, each of spans of at most `form.length` tokens together, in this form.

    Args:
        sources: how many sources there are in all.
        padding: the id that fills rows with too few tokens.
        kinds: by name, an empty array with the dtype and shape of a column that documents may have.
    """
    length = _row_length(rows, form)
    size = len(rows) * length
    placed = _place_spans(rows, length)
    columns = _empty_columns(size, padding, kinds or {})
    for span, start in placed:
        is_predicted = form.predict_across_documents and start % length > 0
        _write_span(span, start, is_predicted, columns)
    ignored = columns["labels"] == IGNORED
    for name in kinds or ():
        columns[name][ignored] = 0
    bounds = np.arange(0, size + 1, length)
    if form.document_mask:
        inner = _starts_of_pieces(placed, form.longest_piece)
        bounds = np.unique([*bounds, *inner])
    columns["position_ids"] = np.arange(size) - np.repeat(bounds[:-1], np.diff(bounds))
    counts = _token_counts(placed, sources) | {"trained_tokens": int((~ignored).sum())}
    sequence_columns: dict[str, Tensor] = {}
    if form.trains_on == "preferences":
        columns["sequence"] = _sequence_numbers(placed, size, form.longest_piece)
        sequence_columns = _sequence_columns(placed, form.judged_by)
        counts |= _sequence_counts(placed, sequence_columns)
    return Batch(
        columns={
            name: torch.from_numpy(column).view(-1, length, *column.shape[1:])
            for name, column in columns.items()
        },
        counts=counts,
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(np.diff(bounds).max()),
        sequence_columns=sequence_columns,
    )


def _empty_columns(
    size: int, padding: int, kinds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The columns of a batch of padding alone, [size] or [size, k]."""
    columns = {
        "input_ids": np.full(size, padding, dtype=np.int64),
        "labels": np.full(size, IGNORED, dtype=np.int64),
        "real": np.zeros(size, dtype=bool),
    }
    for name, kind in kinds.items():
        columns[name] = np.zeros((size, *kind.shape[1:]), dtype=kind.dtype)
    return columns


def _place_spans(rows: Sequence[Sequence[Span]], length: int) -> _Placed:
    """The spans of all rows, which have `length` tokens each."""
    placed = []
    for row, spans in enumerate(rows):
        start = row * length
        for span in spans:
            placed.append((span, start))
            start += len(span.tokens)
    return placed


def _write_span(span: Span, start: int, is_predicted: bool, columns: dict[str, np.ndarray]) -> None:
    """Writes a span into the columns of a batch, from place `start` on.

    If its first token `is_predicted`, it is the label of the place before, in the span before.
    """
    document = span.document
    tokens = span.tokens
    columns["input_ids"][start : start + len(tokens)] = tokens
    columns["real"][start : start + len(tokens)] = True
    first = span.start if is_predicted else span.start + 1
    targets = slice(first, span.stop + 1)
    count = len(document.tokens[targets])
    place = start + first - span.start - 1
    places = slice(place, place + count)
    labels = columns["labels"][places]
    labels[:] = document.tokens[targets]
    if document.trained is not None:
        labels[~document.trained[targets]] = IGNORED
    for begin, _ in document.bounds[1:]:  # no sequence predicts the next one
        if first <= begin < first + count:
            labels[begin - first] = IGNORED
    for name, values in document.columns.items():
        columns[name][places] = values[targets]


def _starts_of_pieces(placed: _Placed, context_len: int) -> list[int]:
    """The places where a piece or padding begins, which does not attend to what is before it."""
    starts: list[int] = []
    for span, start in placed:
        end = start + len(span.tokens)
        shift = start - span.start
        for begin, stop in span.document.bounds:
            within = range(max(shift + begin, start), min(shift + stop, end), context_len)
            starts.extend(within)
        starts.append(end)
    return starts


def _token_counts(placed: _Placed, sources: int) -> dict[str, float]:
    """How many tokens there are, in all and from each source, and how many bytes of text."""
    source_tokens = [0] * sources
    text_bytes = 0.0
    for span, _ in placed:
        source_tokens[span.source] += len(span.tokens)
        share = len(span.tokens) / len(span.document.tokens)
        text_bytes += span.document.text_bytes * share
    counts: dict[str, float] = {"tokens": sum(source_tokens), "text_bytes": text_bytes}
    return counts | {f"source_{place}": count for place, count in enumerate(source_tokens)}


def sequence_names(loss: str) -> tuple[str, ...]:
    """The sequence columns of the documents that a loss of preferences learns from."""
    return ("chosen", "mismatched") if loss == "kto" else ("chosen",)


def _sequence_numbers(placed: _Placed, size: int, context_len: int) -> np.ndarray:
    """The number of the sequence that lies at each place, int64 [size]; 0 where there is none.

    Raises UserError for a sequence of which some would not see the rest.
    """
    numbers = np.zeros(size, dtype=np.int64)
    number = 0
    for span, start in placed:
        for begin, stop in span.document.bounds:
            if stop - begin > context_len:
                raise UserError(
                    f"training.context_len: an answer has {stop - begin:,} tokens with its prompt, "
                    f"of which {context_len:,} see each other; raise it, since answers are not cut."
                )
            numbers[start + begin : start + stop] = number
            number += 1
    return numbers


def _sequence_columns(placed: _Placed, loss: str) -> dict[str, Tensor]:
    """What is known of each sequence, float32 [sequences]."""
    columns = {}
    for name in sequence_names(loss):
        values = [span.document.sequence_columns[name] for span, _ in placed]
        columns[name] = torch.tensor([*chain(*values)], dtype=torch.float32)
    return columns


def _sequence_counts(placed: _Placed, columns: dict[str, Tensor]) -> dict[str, float]:
    """How many pairs of sequences there are, and how many sequences that are judged."""
    judged = len(columns["chosen"])
    if "mismatched" in columns:
        judged -= int(columns["mismatched"].sum())
    return {"pairs": float(len(placed)), "sequences": float(judged)}


def _row_length(rows: Sequence[Sequence[Span]], form: RowForm) -> int:
    """How many tokens a row has: `form.length`, or less where each example has a row of its own.

    It is then what the longest of them takes, if no row is shared among ranks.
    """
    if form.packing.mode != "none" or form.is_shared:
        return form.length
    longest = max(sum(len(span.tokens) for span in spans) for spans in rows)
    return min(form.length, max(1, math.ceil(longest / _ROUNDED)) * _ROUNDED)


def prompt_labels(batch: Batch) -> Tensor:
    """The next token of each place, [B, T], where it is in the same sequence and not trained.

    Everywhere else it is `IGNORED`.
    """
    ids = batch.columns["input_ids"].flatten()
    following = torch.full_like(ids, IGNORED)
    following[:-1] = ids[1:]
    following[batch.cu_seqlens[1:].long() - 1] = IGNORED
    is_prompt = batch.columns["real"].flatten() & (batch.columns["labels"].flatten() == IGNORED)
    return torch.where(is_prompt, following, IGNORED).view(batch.shape)
