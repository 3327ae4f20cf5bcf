"""The spans of each row: laid end to end or fitted, from a table of tokens."""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from lacuna.data.document import Snapshot, Span
from lacuna.data.mixture import shuffled
from lacuna.data.plan import RowPlan
from lacuna.data.tokenize import add_broken

_WINDOW = 8192
_DRAWN_AT_ONCE = 16384

# For each source, how many documents have been passed and, of a stream, where to read on.
Place = list[tuple[int, Snapshot]]
# How much was used from a place on (tokens of a document, or rows of examples that were fitted
# together), and that place.
LaneState = tuple[int, Place]


def open_rows(
    plan: RowPlan, states: dict[int, LaneState | None], broken: list[str]
) -> Callable[[int], list[Span]]:
    """A function from the number of a row to its spans, which fill it.

    Rows are asked for in order, but not all of them. At the end of the documents rows are not full,
    then empty.

    Args:
        states: where each of the lanes that are read goes on (None: at the beginning); updated in
            place.
        broken: gains the places of unreadable records that were met.
    """
    if plan.table is None:
        from lacuna.data.lanes import LaneRows  # an extension

        return LaneRows(plan, states, broken).row
    table = plan.table
    nothing = np.zeros((3, 0), dtype=np.int64)
    rows = enumerate(itertools.chain(_pieces_of_table(plan), itertools.repeat(nothing)))

    def row(wanted: int) -> list[Span]:
        pieces = next(pieces for number, pieces in rows if number == wanted)
        return [
            Span(*table.document(index), start, stop) for index, start, stop in pieces.T.tolist()
        ]

    return row


def rows_from_the_start(plan: RowPlan, count: int) -> Iterator[list[list[Span]]]:
    """The rows of a plan, `count` at a time, until all documents are used up.

    Raises UserError when more records are unreadable than `data.max_broken_records`.
    """
    broken: list[str] = []
    known: dict[str, None] = {}
    row = open_rows(plan, dict.fromkeys(range(plan.mixture.lanes)), broken)
    for first in itertools.count(0, count):
        rows = [row(number) for number in range(first, first + count)]
        add_broken(known, broken, plan.data.max_broken_records)
        if not any(rows):
            return
        yield rows


def documents_begun(plan: RowPlan, rows: int) -> np.ndarray:
    """How often the first `rows` rows begin each document, int64 [documents]."""
    begun = np.zeros(len(plan.tokens.lengths), dtype=np.int64)
    for documents, starts, _ in itertools.islice(_pieces_of_table(plan), rows):
        np.add.at(begun, documents[starts == 0], 1)
    return begun


def _pieces_of_table(plan: RowPlan) -> Iterator[np.ndarray]:
    """The pieces, int64 [3, n], of each row: documents, where these begin, where they end."""
    return _pieces_fitted(plan) if plan.fits else _pieces_end_to_end(plan)


def _pieces_end_to_end(plan: RowPlan) -> Iterator[np.ndarray]:
    """The pieces of rows that are cut out of all drawn documents, laid end to end.

    The rows are shuffled within windows: in one step together, the parts of a long document would
    teach hardly more than one of them. A pass over the documents is cut into even windows. If
    passes are whole, no row holds tokens of two.
    """
    length = plan.form.length
    lengths = plan.tokens.lengths
    in_pass = plan.rows_per_pass or _WINDOW
    in_window = math.ceil(in_pass / math.ceil(in_pass / _WINDOW))
    draws = _drawn_documents(plan)
    # The documents drawn so far, and where each ends in the text of all.
    drawn = np.zeros((2, 1), dtype=np.int64)
    pass_tokens = lengths.sum() if plan.whole_passes else in_pass * length
    for epoch in itertools.count() if plan.endless else [0]:
        for window, within in enumerate(range(0, in_pass, in_window)):
            size = min(in_window, in_pass - within)
            cuts = epoch * pass_tokens + np.minimum(
                (within + np.arange(size + 1)) * length, pass_tokens
            )
            kept = [drawn[:, drawn[1] >= cuts[0]]]
            while kept[-1][1, -1] < cuts[-1]:
                more = next(draws)
                kept.append(np.stack([more, kept[-1][1, -1] + np.cumsum(lengths[more])]))
            drawn = np.concatenate(kept, axis=1)
            documents, ends = drawn
            edges = np.union1d(cuts, ends.clip(cuts[0], cuts[-1]))
            found = np.searchsorted(ends, edges[:-1], side="right")
            starts = edges[:-1] - (ends - lengths[documents])[found]
            pieces = np.stack([documents[found], starts, starts + np.diff(edges)])
            bounds = np.searchsorted(edges, cuts).tolist()
            for place in shuffled(size, plan.mixture.pools[0].key, epoch, window).tolist():
                yield pieces[:, bounds[place] : bounds[place + 1]]


def _pieces_fitted(plan: RowPlan) -> Iterator[np.ndarray]:
    """The pieces of rows of whole examples, which are shuffled anew for each pass.

    The examples of a pass are fitted together. Sources mixed by weight have no pass: the documents
    that are drawn next are fitted together.
    """
    draws = _drawn_documents(plan)
    for number in itertools.count(1) if plan.endless else [1]:
        bins = plan.bins_of(next(draws)) if plan.rows_per_pass is None else plan.bins
        for place in shuffled(len(bins), plan.mixture.pools[0].key, number).tolist():
            yield bins[place]


def _drawn_documents(plan: RowPlan) -> Iterator[np.ndarray]:
    """The documents in the table, int64 [n] at a time, in the order in which they are drawn."""
    pool_starts = np.cumsum([0, *(pool.size for pool in plan.mixture.pools)])
    cursors = np.zeros(len(plan.mixture.pools), dtype=np.int64)
    while True:
        choices, index = plan.mixture.draw(0, cursors, _DRAWN_AT_ONCE)
        documents = pool_starts[choices] + index
        yield documents if plan.order is None else plan.order[documents]
        cursors += np.bincount(choices, minlength=len(cursors))
