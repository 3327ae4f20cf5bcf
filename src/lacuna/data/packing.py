"""Documents to rows and rows to batches: which share a row, and the inputs, labels, positions and bounds of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lacuna.config import Config, UserError, refuse

IGNORED = -100
_ROUNDED = 64  # rows of many lengths would make many kernels


@dataclass(frozen=True)
class Document:
    """One document: a text, a conversation, or sequences that are compared with each other.

    Attributes:
        tokens: int32 or uint16 [n], the end of text among them.
        text_bytes: the UTF-8 bytes of its text (nan: unknown).
        broken: where it was found, if it is unreadable and has no tokens.
        trained: bool [n], whether a token is to be predicted; None: all are.
        columns: by name [n] or [n, k], more of each token as one that is predicted, such as a weight.
        ends: where each of its sequences ends; empty where it is one.
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
    """A run inside one row: the tokens [start, stop) of a document, fewer where it ends before, and its source."""

    document: Document
    source: int
    start: int
    stop: int

    @property
    def tokens(self) -> np.ndarray:
        """Those of the document."""
        return self.document.tokens[self.start : self.stop]

    @property
    def trained(self) -> np.ndarray:
        """Whether each is to be predicted, bool; the first of each sequence is by none."""
        whole = self.document.trained
        if whole is None:
            whole = np.ones(len(self.document.tokens), dtype=bool)
        trained = whole[self.start : self.stop].copy()
        firsts = [first - self.start for first, _ in self.document.bounds if first >= self.start]
        trained[[0, *(first for first in firsts if first < len(trained))]] = False
        return trained


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank; B sequences of T tokens; tensors on the CPU.

    Attributes:
        columns: by name [B, T], or [B, T, k], one value or vector a token. What every batch has:
            input_ids: int64.
            labels: int64, already shifted: the target of position t; -100 where nothing is trained.
            position_ids: int64, from 0 in each piece (from 0 in each row when documents are not
                masked).
            real: bool, whether a token is one of a document, and not padding.
            Where preferences are trained on, also sequence: int64, the number within the batch of
            the sequence that the label is of; 0 where nothing is trained. Columns of the documents
            lie beside the label that they are of; they are 0 where nothing is trained.
        counts: by name, what is summed over micro-batches and ranks. What every batch has:
            tokens: input tokens that are not padding.
            trained_tokens: labels that are not -100.
            text_bytes: UTF-8 bytes of the text these tokens came from (nan when only tokens are
                known).
            source_0 and so on: real tokens from each source, in the order of the configuration.
            Where preferences are trained on, also pairs: documents of two sequences; and sequences:
            those that are judged, without mismatched ones.
        cu_seqlens: int32 [n + 1], bounds of the pieces in the flattened B * T order; every row end
            is one.
        max_seqlen: tokens in the longest piece.
        sequence_columns: by name float32 [sequences], one value for each of the sequences whose
            number is in the column `sequence`.
            Of preferences chosen: 1 for a sequence that is wanted, 0 for one that is not; for kto
            also mismatched: 1 where the answer is one to another prompt.
        own_columns: by name [B, T', ...], what was found out by this rank of its share of the
            tokens, on its device.
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


def packing_mode(config: Config) -> str:
    """`packing.mode`, by default that of the task: conversations are not cut, texts laid end to end."""
    automatic = "best_fit" if config.conversations is not None else "concatenate"
    return automatic if config.packing.mode == "auto" else config.packing.mode


def fill_rows(
    lengths: np.ndarray, document: Callable[[int], Document], config: Config, ordered: bool = False
) -> list[np.ndarray]:
    """The pieces of each row: int64 [3, n], the number of a document, its first token and the one after the last.

    `lengths` are those of all documents, of which `document` gives one; an empty one takes no room.
    If they are `ordered`, only those share rows that come together in the buffer. Raises UserError
    when nothing is left of them.
    """
    pieces = _cut(lengths, document, config)
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    space, sizes = config.training.seq_len, pieces[:, 2] - pieces[:, 1]
    wrong = f"packing.long_examples: none of {len(lengths)} examples has a trained token within {space} tokens"
    refuse(
        {f"{wrong}; raise training.seq_len, or split them": len(lengths) > 0 and not len(pieces)}
    )
    if packing_mode(config) == "none":
        return [piece[:, None] for piece in pieces]
    buffer = np.cumsum(sizes) // (config.packing.buffer * space if ordered else np.inf)
    together = np.split(pieces, np.flatnonzero(np.diff(buffer)) + 1)
    return [
        those[chosen].T
        for those in together
        for chosen in best_fit(those[:, 2] - those[:, 1], space)
    ]


def _cut(lengths: np.ndarray, document: Callable[[int], Document], config: Config) -> np.ndarray:
    """int64 [pieces, 3]; pieces of long documents in which nothing is trained are left out."""
    most, long_examples = config.training.seq_len, config.packing.long_examples
    if config.trains_on == "preferences":
        refuse_long_pairs(lengths, most, long_examples)
    fitting, long = (
        np.flatnonzero((lengths > 0) & (lengths <= most)),
        np.flatnonzero(lengths > most),
    )
    pieces = [np.stack([fitting, np.zeros_like(fitting), lengths[fitting]], axis=1)]
    for number in long.tolist() if long_examples != "drop" else ():
        stop = int(lengths[number]) if long_examples == "split" else most
        # Each token is predicted before it.
        trained = Span(document(number), 0, 0, stop + 1).trained[1:]
        labelled = np.flatnonzero(trained)
        starts = np.unique(labelled // most) * most
        pieces.append(
            np.stack(
                [np.full_like(starts, number), starts, np.minimum(starts + most, stop)], axis=1
            )
        )
    return np.concatenate(pieces)


def refuse_long_pairs(lengths: np.ndarray, most: int, long_examples: str) -> None:
    """Raises UserError for pairs of more than `most` tokens, unless long examples are dropped."""
    long = lengths[lengths > most]
    if len(long) and long_examples != "drop":
        raise UserError(
            f"training.seq_len: {len(long):,} of {len(lengths):,} pairs are longer than a row of "
            f"{most} tokens, the longest {long.max():,}, and a pair cannot be cut; raise it, or set "
            'packing.long_examples = "drop" to leave them out.'
        )


def best_fit(lengths: np.ndarray, space: int) -> list[list[int]]:
    """Bins of at most `space` tokens, each the numbers of the pieces in it, by best-fit decreasing (Johnson, 1973).

    Each piece, the longest first, goes to the fullest bin that has room for it.
    """
    bins: list[list[int]] = []
    roomy: dict[int, list[list[int]]] = {
        0: [],
        space: [],
    }  # bins by the tokens that they have room for
    rooms = 0  # bit n is set where a bin has room for n > 0, so that the least room that suffices is found at once
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else space
        if not roomy[room]:
            bins.append([])
            roomy[room].append(bins[-1])
        chosen = roomy[room].pop()
        chosen.append(piece)
        roomy.setdefault(room - length, []).append(chosen)
        rooms |= 1 << room - length
        rooms &= ~(1 | (not roomy[room]) << room)
    return bins


def pack(
    rows: Sequence[Sequence[Span]],
    config: Config,
    sources: int,
    padding: int,
    kinds: Mapping[str, np.ndarray] | None = None,
) -> Batch:
    """Lay out rows, each of spans of at most seq_len tokens together, as the settings want them.

    Args:
        sources: how many there are in all.
        padding: the id that fills rows with too few tokens.
        kinds: of each column that documents may have of their tokens an empty array, by name.
    """
    length = _row_length(rows, config)
    size = len(rows) * length
    placed = _placed(rows, length)
    columns = {
        "input_ids": np.full(size, padding, dtype=np.int64),
        "labels": np.full(size, IGNORED, dtype=np.int64),
        "real": np.zeros(size, dtype=bool),
    }
    for name, kind in (kinds or {}).items():
        columns[name] = np.zeros((size, *kind.shape[1:]), dtype=kind.dtype)
    for span, start in placed:
        across = config.data.predict_across_documents and start % length > 0
        _lay(span, start, across, columns)
    ignored = columns["labels"] == IGNORED
    for name in kinds or ():
        columns[name][ignored] = 0
    bounds = _bounds(placed, len(rows), length, config)
    columns["position_ids"] = np.arange(size) - np.repeat(bounds[:-1], np.diff(bounds))
    counts = _counts(placed, sources) | {"trained_tokens": int((~ignored).sum())}
    sequence_columns: dict[str, Tensor] = {}
    if config.trains_on == "preferences":
        columns["sequence"] = np.where(ignored, 0, _sequence_numbers(placed, size))
        sequence_columns = _sequence_columns(placed, config.preference.loss)
        sequences = len(sequence_columns["chosen"])
        mismatched = sequence_columns.get("mismatched", torch.zeros(0))
        counts["pairs"] = float(len(placed))
        counts["sequences"] = sequences - mismatched.sum().item()
    return Batch(
        columns={
            name: torch.from_numpy(one).view(-1, length, *one.shape[1:])
            for name, one in columns.items()
        },
        counts=counts,
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(np.diff(bounds).max()),
        sequence_columns=sequence_columns,
    )


def _placed(rows: Sequence[Sequence[Span]], length: int) -> list[tuple[Span, int]]:
    """Every span, and where it begins where rows of `length` tokens lie one after the other."""
    placed = []
    for row, spans in enumerate(rows):
        start = row * length
        for span in spans:
            placed.append((span, start))
            start += len(span.tokens)
    return placed


def _lay(span: Span, start: int, across: bool, columns: dict[str, np.ndarray]) -> None:
    """Write a span into the columns of a batch from place `start` on, where it lies.

    If it is `across`, the token before it is trained to predict its first.
    """
    document, tokens = span.document, span.tokens
    columns["input_ids"][start : start + len(tokens)] = tokens
    columns["real"][start : start + len(tokens)] = True
    first = span.start if across else span.start + 1
    targets = slice(first, span.stop + 1)
    before = start - span.start - 1  # of a token of the document, the place that predicts it
    count = len(document.tokens[targets])
    places = slice(before + first, before + first + count)
    labels = columns["labels"][places]
    labels[:] = document.tokens[targets]
    if document.trained is not None:
        labels[~document.trained[targets]] = IGNORED
    for begin, _ in document.bounds[1:]:  # no sequence predicts the next one
        if first <= begin < first + count:
            labels[begin - first] = IGNORED
    for name, values in document.columns.items():
        columns[name][places] = values[targets]


def _bounds(
    placed: Sequence[tuple[Span, int]], rows: int, length: int, config: Config
) -> np.ndarray:
    """Where the pieces begin that do not attend to each other, and the end, int64 [pieces + 1]."""
    starts = list(range(0, rows * length, length))
    for span, start in placed if config.data.document_mask else ():
        shift = start - span.start
        end = start + len(span.tokens)
        for begin, stop in span.document.bounds:
            within = range(max(shift + begin, start), min(shift + stop, end))
            starts.extend(within[:: config.training.context_len])
        starts.append(end)  # of padding or the next document; nothing where the row is full
    return np.unique([*starts, rows * length])


def _counts(placed: Sequence[tuple[Span, int]], sources: int) -> dict[str, float]:
    """The tokens of the batch and of each source, and the bytes of their text."""
    source_tokens, text_bytes = [0] * sources, 0.0
    for span, _ in placed:
        source_tokens[span.source] += len(span.tokens)
        document = span.document
        text_bytes += document.text_bytes * len(span.tokens) / len(document.tokens)
    counts: dict[str, float] = {"tokens": sum(source_tokens), "text_bytes": text_bytes}
    return counts | {f"source_{place}": count for place, count in enumerate(source_tokens)}


def _sequence_numbers(placed: Sequence[tuple[Span, int]], size: int) -> np.ndarray:
    """The number, in the whole batch, of the sequence that each place is of, int64 [size]."""
    numbers = np.zeros(size, dtype=np.int64)
    number = 0
    for span, start in placed:
        for begin, stop in span.document.bounds:
            numbers[start + begin : start + stop] = number
            number += 1
    return numbers


def sequence_names(loss: str) -> tuple[str, ...]:
    """The sequence columns of documents that a loss of preferences learns from."""
    return ("chosen", "mismatched") if loss == "kto" else ("chosen",)


def _sequence_columns(placed: Sequence[tuple[Span, int]], loss: str) -> dict[str, Tensor]:
    """What documents have of each of their sequences, float32 [sequences]."""
    documents = [span.document for span, _ in placed]
    values = {
        name: [value for document in documents for value in document.sequence_columns[name]]
        for name in sequence_names(loss)
    }
    return {name: torch.tensor(each, dtype=torch.float32) for name, each in values.items()}


def _row_length(rows: Sequence[Sequence[Span]], config: Config) -> int:
    """Tokens per row: seq_len, or where every example has a row of its own as many as the longest takes."""
    layout = config.parallelism
    shared = (
        layout.tensor_parallel_degree
        * layout.context_parallel_degree
        * layout.pipeline_parallel_degree
        > 1
    )
    if config.packing.mode != "none" or shared:
        return config.training.seq_len
    longest = max(sum(len(span.tokens) for span in spans) for spans in rows)
    return min(config.training.seq_len, max(1, -(-longest // _ROUNDED)) * _ROUNDED)
