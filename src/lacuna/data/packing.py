"""Documents to rows and rows to batches: which share a row, and the inputs, labels, positions and bounds of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lacuna.config import Config, refuse

IGNORED = -100
_ROUNDED = 64  # rows of many lengths would make many kernels


@dataclass(frozen=True)
class Document:
    """One document: int32 tokens [n], the end of text among them, and its text's UTF-8 bytes (nan: unknown).

    A token that is not to be trained is there as its complement, ~token. An unreadable document has
    no tokens, and `broken` says where it was found.
    """

    tokens: np.ndarray
    text_bytes: float
    broken: str | None = None


@dataclass(frozen=True)
class Span:
    """A run inside one row: the tokens [start, stop) of a document, fewer where it ends before, and its source."""

    document: Document
    source: int
    start: int
    stop: int

    @property
    def tokens(self) -> np.ndarray:
        """As the document has them."""
        return self.document.tokens[self.start : self.stop]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank; B sequences of T tokens; tensors on the CPU.

    Attributes:
        columns: by name [B, T], one value a token. What every batch has:
            input_ids: int64.
            labels: int64, already shifted: the target of position t; -100 where nothing is trained.
            position_ids: int64, from 0 in each piece (from 0 in each row when documents are not
                masked).
            real: bool, whether a token is one of a document, and not padding.
        counts: by name, what is summed over micro-batches and ranks. What every batch has:
            tokens: input tokens that are not padding.
            trained_tokens: labels that are not -100.
            text_bytes: UTF-8 bytes of the text these tokens came from (nan when only tokens are
                known).
            source_0 and so on: real tokens from each source, in the order of the configuration.
        cu_seqlens: int32 [n + 1], bounds of the pieces in the flattened B * T order; every row end
            is one.
        max_seqlen: tokens in the longest piece.
        sequence_columns: by name [sequences], one value for each of the sequences whose number is
            in the column `sequence`.
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
    fitting, long = (
        np.flatnonzero((lengths > 0) & (lengths <= most)),
        np.flatnonzero(lengths > most),
    )
    pieces = [np.stack([fitting, np.zeros_like(fitting), lengths[fitting]], axis=1)]
    for number in long.tolist() if long_examples != "drop" else ():
        stop = int(lengths[number]) if long_examples == "split" else most
        labelled = np.flatnonzero(
            document(number).tokens[1 : stop + 1] >= 0
        )  # each token is predicted before it
        starts = np.unique(labelled // most) * most
        pieces.append(
            np.stack(
                [np.full_like(starts, number), starts, np.minimum(starts + most, stop)], axis=1
            )
        )
    return np.concatenate(pieces)


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


def pack(rows: Sequence[Sequence[Span]], config: Config, sources: int, padding: int) -> Batch:
    """Lay out rows, each a sequence of spans of at most seq_len tokens together, as training and data are set.

    Args:
        sources: how many there are in all.
        padding: the id that fills rows with too few tokens.
    """
    training, data = config.training, config.data
    length = _row_length(rows, config)
    input_ids = np.full(len(rows) * length, padding, dtype=np.int64)
    labels = np.full_like(input_ids, IGNORED)
    real = np.zeros_like(input_ids, dtype=bool)
    source_tokens, text_bytes = [0] * sources, 0.0
    starts = list(range(0, len(input_ids), length))
    for row, spans in enumerate(rows):
        first = end = row * length
        for span in spans:
            tokens, targets = span.tokens, span.document.tokens[span.start + 1 : span.stop + 1]
            start, end = end, end + len(tokens)
            input_ids[start:end] = tokens
            real[start:end] = True
            labels[start : start + len(targets)] = targets
            if data.predict_across_documents and start > first:
                labels[start - 1] = tokens[0]
            if data.document_mask:
                starts.extend(range(start, end, training.context_len))
            source_tokens[span.source] += len(tokens)
            text_bytes += span.document.text_bytes * len(tokens) / len(span.document.tokens)
        if data.document_mask:
            starts.append(end)  # of the padding; nothing where the row is full
    input_ids = np.where(input_ids < 0, ~input_ids, input_ids)
    labels[labels < 0] = IGNORED
    bounds = np.unique([*starts, len(input_ids)])
    positions = np.arange(len(input_ids)) - np.repeat(bounds[:-1], np.diff(bounds))
    columns = {"input_ids": input_ids, "labels": labels, "position_ids": positions, "real": real}
    counts = {
        "tokens": sum(source_tokens),
        "trained_tokens": int((labels != IGNORED).sum()),
        "text_bytes": text_bytes,
    }
    return Batch(
        columns={name: torch.from_numpy(one).view(-1, length) for name, one in columns.items()},
        counts=counts | {f"source_{place}": count for place, count in enumerate(source_tokens)},
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(np.diff(bounds).max()),
    )


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
