"""The spans of each row: from a table of all tokens, laid end to end or fitted, or from documents as they come."""

import math
from collections.abc import Callable

import numpy as np

from lacuna.data.lanes import LaneRows, LaneState
from lacuna.data.mixture import shuffled
from lacuna.data.packing import Span
from lacuna.data.plan import Plan

_WINDOW = 8192
_DRAWN_AT_ONCE = 16384


def open_rows(plan: Plan, states: dict[int, LaneState | None], broken: list[str]) -> Callable[[int], list[Span]]:
    """A function from the number of a row to its spans, which fill it but at the end of the documents.

    Args:
        states: of the lanes that are read, where each goes on (None: the beginning); kept up to date in place.
        broken: gains the places of unreadable records that were met.
    """
    if plan.table is None:
        return LaneRows(plan, states, broken).row
    return FittedRows(plan).row if plan.fits else IndexedRows(plan).row


class IndexedRows:
    """The tokens [P * seq_len, (P + 1) * seq_len) of all drawn documents laid end to end are place P.

    Rows are the places, shuffled within windows: side by side in one step, the parts of a long document teach hardly
    more than one of them. A pass over the documents is cut into even windows.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._end = math.inf if plan.endless else int(plan.table.lengths.sum())
        self._pass = plan.rows_per_pass or _WINDOW
        self._window = math.ceil(self._pass / math.ceil(self._pass / _WINDOW))
        self._pool_starts = np.cumsum([0, *(pool.size for pool in plan.mixture.pools)])
        self._cursors = np.zeros(len(plan.mixture.pools), dtype=np.int64)
        self._drawn = np.zeros((2, 1), dtype=np.int64)

    def row(self, number: int) -> list[Span]:
        """The spans of a row; rows are asked for in order."""
        epoch, within = divmod(number, self._pass)
        window, offset = divmod(within, self._window)
        size = min(self._window, self._pass - within + offset)
        order = shuffled(size, self._plan.mixture.pools[0].key, epoch, window)
        length, first = self._plan.config.training.seq_len, number - offset
        position = (first + int(order[offset])) * length
        stop = min(position + length, self._end)
        if self._drawn[1, -1] < stop:
            self._draw(first * length, stop)
        spans = []
        while position < stop:
            index, end = self._drawn[:, np.searchsorted(self._drawn[1], position, side="right")].tolist()
            document, source = self._plan.table.document(index)
            start = len(document.tokens) - (end - position)
            spans.append(document.span(start, start + stop - position, source))
            position += len(spans[-1].tokens)
        return spans

    def _draw(self, start: int, stop: int) -> None:
        """Draw documents until they reach the token `stop`, and forget those that end before the token `start`.

        Of each draw there is the document, and where it ends in the endless run of tokens.
        """
        kept = [self._drawn[:, self._drawn[1] > start]]
        end = int(self._drawn[1, -1])
        while end < stop:
            choices, index = self._plan.mixture.draw(0, self._cursors, _DRAWN_AT_ONCE)
            documents = self._pool_starts[choices] + index
            drawn = np.stack([documents, end + np.cumsum(self._plan.table.lengths[documents])])
            kept.append(drawn[:, drawn[1] > start])
            end = int(drawn[1, -1])
            self._cursors += np.bincount(choices, minlength=len(self._cursors))
        self._drawn = np.concatenate(kept, axis=1)


class FittedRows:
    """Rows of whole examples, fitted together in one pass over all of them, and shuffled anew for each.

    Sources mixed by weight have no pass: there the next of their draws are fitted together.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pool_starts = np.cumsum([0, *(pool.size for pool in plan.mixture.pools)])
        self._cursors = np.zeros(len(plan.mixture.pools), dtype=np.int64)
        self._bins: list[np.ndarray] = []
        self._first = self._passes = 0

    def row(self, number: int) -> list[Span]:
        """The spans of a row; rows are asked for in order."""
        while number >= self._first + len(self._bins):
            if self._passes and not self._plan.endless:
                return []
            self._go_on()
        order = shuffled(len(self._bins), self._plan.mixture.pools[0].key, self._passes)
        spans = []
        for index, start, stop in self._bins[order[number - self._first]].T.tolist():
            document, source = self._plan.table.document(index)
            spans.append(document.span(start, stop, source))
        return spans

    def _go_on(self) -> None:
        self._first += len(self._bins)
        self._passes += 1
        if self._plan.rows_per_pass is not None:
            self._bins = self._plan.bins
            return
        choices, index = self._plan.mixture.draw(0, self._cursors, _DRAWN_AT_ONCE)
        self._bins = self._plan.bins_of(self._pool_starts[choices] + index)
        self._cursors += np.bincount(choices, minlength=len(self._cursors))
