"""Documents to rows: which of them share a row, and what happens to those that are too long."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from lacuna.config import UserError
from lacuna.config.documents import PackingConfig
from lacuna.config.row_form import RowForm
from lacuna.data.document import Document, Span


def fill_rows(
    lengths: np.ndarray,
    document: Callable[[int], Document],
    space: int,
    packing: PackingConfig,
    ordered: bool = False,
) -> list[np.ndarray]:
    """The pieces of documents that make up each row of at most `space` tokens.

    Each row is int64 [3, n]: the numbers of documents, the first token of each piece, and the one
    after its last. `lengths` has the length of every document, and `document` gives a document by
    its number. Empty documents take no room. If documents are `ordered`, only those share rows that
    are in the buffer together. Raises UserError when no document is left.
    """
    pieces = _cut_to_pieces(lengths, document, space, packing.long_examples)
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    sizes = pieces[:, 2] - pieces[:, 1]
    if len(lengths) > 0 and not len(pieces):
        refuse_long_examples(len(lengths), space)
    if packing.mode == "none":
        return [piece[:, None] for piece in pieces]
    in_buffer = packing.buffer * space if ordered else np.inf
    buffers = np.cumsum(sizes) // in_buffer
    rows = []
    for together in np.split(pieces, np.flatnonzero(np.diff(buffers)) + 1):
        chosen = best_fit(together[:, 2] - together[:, 1], space)
        rows += [together[numbers].T for numbers in chosen]
    return rows


def refuse_long_examples(count: int, space: int) -> NoReturn:
    """Raises UserError for so many examples of which none has something for rows of this size."""
    raise UserError(
        f"packing.long_examples: none of {count:,} examples has a trained token within {space:,} "
        "tokens; raise training.seq_len, or split them."
    )


def tokens_kept(document: Document, space: int, packing: PackingConfig) -> int:
    """How many tokens of a document rows of at most `space` tokens have."""
    lengths = np.array([len(document.tokens)])
    pieces = _cut_to_pieces(lengths, lambda _: document, space, packing.long_examples)
    return int((pieces[:, 2] - pieces[:, 1]).sum())


def _cut_to_pieces(
    lengths: np.ndarray, document: Callable[[int], Document], space: int, long_examples: str
) -> np.ndarray:
    """The pieces of all documents, int64 [pieces, 3].

    Pieces of long documents in which nothing is trained are left out.
    """
    fitting = np.flatnonzero((lengths > 0) & (lengths <= space))
    pieces = [np.stack([fitting, np.zeros_like(fitting), lengths[fitting]], axis=1)]
    if long_examples == "drop":
        return pieces[0]
    for number in np.flatnonzero(lengths > space).tolist():
        stop = int(lengths[number]) if long_examples == "split" else space
        trained = Span(document(number), 0, 0, stop + 1).trained
        predicting = np.flatnonzero(trained[1:])  # each token is predicted at the place before it
        starts = np.unique(predicting // space) * space
        numbers = np.full_like(starts, number)
        pieces.append(np.stack([numbers, starts, np.minimum(starts + space, stop)], axis=1))
    return np.concatenate(pieces)


def refuse_long_pairs(lengths: np.ndarray, forms: Sequence[RowForm]) -> None:
    """Raises UserError for pairs of these lengths, too long for the rows of one of the stages."""
    from lacuna.data.pairs import refuse_long_pairs  # an extension, which few runs need

    refuse_long_pairs(lengths, forms)


def best_fit(lengths: np.ndarray, space: int) -> list[list[int]]:
    """Bins of at most `space` tokens, each a list of the numbers of the pieces in it.

    Best-fit decreasing (Johnson, 1973): each piece, the longest first, goes to the fullest bin that
    has room for it.
    """
    bins: list[list[int]] = []
    # Bins by the tokens that they have room for.
    roomy: dict[int, list[list[int]]] = {0: [], space: []}
    # Bit n is set where a bin has room for n > 0 tokens, so that the least room that suffices is
    # found at once.
    rooms = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        room = space
        if fitting := rooms >> length:
            lowest = fitting & -fitting
            room = length + lowest.bit_length() - 1
        if not roomy[room]:
            bins.append([])
            roomy[room].append(bins[-1])
        chosen = roomy[room].pop()
        chosen.append(piece)
        roomy.setdefault(room - length, []).append(chosen)
        rooms |= 1 << (room - length)
        rooms &= ~1
        if not roomy[room]:
            rooms &= ~(1 << room)
    return bins
