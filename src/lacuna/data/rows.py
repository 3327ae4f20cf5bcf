"""The spans of each row: from a table of all tokens, laid end to end or fitted, or from documents as they come."""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from lacuna.data.lanes import LaneRows, LaneState
from lacuna.data.mixture import shuffled
from lacuna.data.packing import Span
from lacuna.data.plan import Plan

_WINDOW = 8192
_DRAWN_AT_ONCE = 16384


def open_rows(plan: Plan, states: dict[int, LaneState | None], broken: list[str]) -> Callable[[int], list[Span]]:
    """A function from the number of a row to its spans, which fill it but at the end of the documents.

    Rows are asked for in order, but not all of them.

    Args:
        states: of the lanes that are read, where each goes on (None: the beginning); kept up to date in place.
        broken: gains the places of unreadable records that were met.
    """
    if plan.table is None:
        return LaneRows(plan, states, broken).row
    made = _fitted(plan) if plan.fits else _laid_end_to_end(plan)
    rows = enumerate(itertools.chain(made, itertools.repeat(())))  # after the last document there are empty rows

    def row(wanted: int) -> list[Span]:
        spans = []
        for index, start, stop in np.transpose(next(pieces for number, pieces in rows if number == wanted)).tolist():
            document, source = plan.table.document(index)
            spans.append(document.span(start, stop, source))
        return spans

    return row


def _laid_end_to_end(plan: Plan) -> Iterator[np.ndarray]:
    """The pieces, int64 [3, n], of rows that are cut out of all drawn documents, laid end to end.

    The rows are shuffled within windows: side by side in one step, the parts of a long document teach hardly more than
    one of them. A pass over the documents is cut into even windows.
    """
    length, lengths = plan.config.training.seq_len, plan.table.lengths
    in_pass = plan.rows_per_pass or _WINDOW
    in_window = math.ceil(in_pass / math.ceil(in_pass / _WINDOW))
    drawn, draws = np.zeros((2, 1), dtype=np.int64), _draws(plan)  # documents, and where each ends
    for epoch in itertools.count() if plan.endless else [0]:
        for window, within in enumerate(range(0, in_pass, in_window)):
            size = min(in_window, in_pass - within)
            cuts = (epoch * in_pass + within + np.arange(size + 1)) * length
            if not plan.endless:
                cuts = cuts.clip(max=lengths.sum())
            kept = [drawn[:, drawn[1] >= cuts[0]]]
            while kept[-1][1, -1] < cuts[-1]:
                more = next(draws)
                kept.append(np.stack([more, kept[-1][1, -1] + np.cumsum(lengths[more])]))
            documents, ends = drawn = np.concatenate(kept, axis=1)
            inside = (ends > cuts[0]) & (ends < cuts[-1])
            edges = np.sort(np.concatenate([cuts, ends[inside]]), kind="stable")  # two runs in order: merged
            edges = edges[np.diff(edges, prepend=-1) > 0]
            found = np.searchsorted(ends, edges[:-1], side="right")
            starts = edges[:-1] - (ends - lengths[documents])[found]
            pieces = np.stack([documents[found], starts, starts + np.diff(edges)])
            bounds = np.searchsorted(edges, cuts).tolist()
            for place in shuffled(size, plan.mixture.pools[0].key, epoch, window).tolist():
                yield pieces[:, bounds[place] : bounds[place + 1]]


def _fitted(plan: Plan) -> Iterator[np.ndarray]:
    """The pieces of rows of whole examples, fitted together in one pass over all of them, and shuffled anew for each.

    Sources mixed by weight have no pass: there the next of their draws are fitted together.
    """
    draws = _draws(plan)
    for number in itertools.count(1) if plan.endless else [1]:
        bins = plan.bins_of(next(draws)) if plan.rows_per_pass is None else plan.bins
        for place in shuffled(len(bins), plan.mixture.pools[0].key, number).tolist():
            yield bins[place]


def _draws(plan: Plan) -> Iterator[np.ndarray]:
    """The documents in the table, int64 [n] at a time, in the order in which they are drawn."""
    pool_starts = np.cumsum([0, *(pool.size for pool in plan.mixture.pools)])
    cursors = np.zeros(len(plan.mixture.pools), dtype=np.int64)
    while True:
        choices, index = plan.mixture.draw(0, cursors, _DRAWN_AT_ONCE)
        yield pool_starts[choices] + index
        cursors += np.bincount(choices, minlength=len(cursors))
