"""Rows cut from tokenised documents laid end to end, in shuffled order; any process can make any row."""

import math
from typing import Any

import numpy as np

from lacuna.data.mixture import shuffled
from lacuna.data.packing import Span
from lacuna.data.plan import Plan

_DRAWN_AT_ONCE = 16384
_WINDOW = 8192


class IndexedRows:
    """The tokens [P * seq_len, (P + 1) * seq_len) of all drawn documents laid end to end are place P.

    Rows are the places, shuffled within windows: side by side in one step, the parts of a long document teach hardly
    more than one of them. A pass over the documents is cut into even windows.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._end = math.inf if plan.endless else plan.tokens_per_pass
        self._pass = -(-(plan.tokens_per_pass or 0) // plan.config.training.seq_len) or _WINDOW
        self._window = -(-self._pass // -(-self._pass // _WINDOW))
        self._cursors = np.zeros(len(plan.mixture.pools), dtype=np.int64)
        self._drawn = np.zeros((3, 1), dtype=np.int64)
        self.moved: dict[int, Any] = {}
        self.broken: list[str] = []

    def row(self, number: int) -> list[Span]:
        """The spans of a row, which fill it but at the end of the documents; rows are asked for in order."""
        length = self._plan.config.training.seq_len
        window, place = self._place(number)
        position, stop = place * length, min((place + 1) * length, self._end)
        if self._drawn[2, -1] < stop:
            self._draw(window * length, stop)
        spans = []
        while position < stop:
            draw = np.searchsorted(self._drawn[2], position, side="right")
            source, index, end = self._drawn[:, draw].tolist()
            document = self._plan.tables[source].document(index)
            start = len(document.tokens) - (end - position)
            spans.append(document.span(start, start + stop - position, source))
            position += len(spans[-1].tokens)
        return spans

    def _place(self, row: int) -> tuple[int, int]:
        """The first place of the window that a row is shuffled in, and the row's own."""
        epoch, within = divmod(row, self._pass)
        window, number = divmod(within, self._window)
        size = min(self._window, self._pass - within + number)
        order = shuffled(size, self._plan.mixture.pools[0].key, epoch, window)
        return row - number, row - number + int(order[number])

    def _draw(self, start: int, stop: int) -> None:
        """Draw documents until they reach the token `stop`, and forget those that end before the token `start`.

        Of each draw there is its source, the document in it, and where that ends in the endless run of tokens.
        """
        kept = [self._drawn[:, self._drawn[2] > start]]
        end = int(self._drawn[2, -1])
        while end < stop:
            choices, sources, indices = self._plan.mixture.draw(0, self._cursors, _DRAWN_AT_ONCE)
            lengths = np.empty_like(indices)
            for source, table in enumerate(self._plan.tables):
                lengths[sources == source] = table.lengths[indices[sources == source]]
            kept.append(np.stack([sources, indices, end + np.cumsum(lengths)]))
            end = int(kept[-1][2, -1])
            self._cursors += np.bincount(choices, minlength=len(self._cursors))
        self._drawn = np.concatenate(kept, axis=1)
