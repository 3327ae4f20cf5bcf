"""Rows cut from tokenised documents laid end to end, in shuffled order; any process can make any row."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lacuna.data.mixture import permute, random_key
from lacuna.data.packing import Span
from lacuna.data.plan import Plan

_BLOCK = 16384
_WINDOW = 8192


class _Block(NamedTuple):
    """Consecutive draws: sources, documents in them, and where each ends in the endless run of tokens.

    `cursors` counts the draws from each pool up to the end of the block.
    """

    sources: np.ndarray
    indices: np.ndarray
    ends: np.ndarray
    cursors: np.ndarray


@lru_cache(maxsize=2)
def _shuffled(size: int, *key: int) -> np.ndarray:
    return permute(np.arange(size), size, np.full(size, random_key(*key), dtype=np.uint64))


class IndexedRows:
    """The tokens [P * seq_len, (P + 1) * seq_len) of all drawn documents laid end to end are place P.

    Rows are the places, shuffled within windows: side by side in one step, the parts of a long document teach hardly
    more than one of them. A pass over the documents is cut into even windows.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._end = math.inf if plan.endless else plan.tokens_per_pass
        self._pass = -(-(plan.tokens_per_pass or 0) // plan.config.training.seq_len) or _WINDOW
        self._blocks = [self._make_block(0, np.zeros(len(plan.mixture.pools), dtype=np.int64))]
        self.broken: list[str] = []

    def row(self, number: int) -> list[Span]:
        """The spans of a row, which fill it but at the end of the documents; rows are asked for in order."""
        length = self._plan.config.training.seq_len
        window, place = self._place(number)
        while len(self._blocks) > 1 and self._blocks[0].ends[-1] <= window * length:
            del self._blocks[0]
        position, stop = place * length, min((place + 1) * length, self._end)
        spans = []
        while position < stop:
            spans.append(self._span(position, stop))
            position += len(spans[-1].tokens)
        return spans

    def _place(self, row: int) -> tuple[int, int]:
        """The first place of the window that a row is shuffled in, and the row's own."""
        key = self._plan.mixture.pools[0].key
        if key is None:
            return row, row
        epoch, within = divmod(row, self._pass)
        windows = -(-self._pass // _WINDOW)
        window = within * windows // self._pass
        first, end = (-(-number * self._pass // windows) for number in (window, window + 1))
        order = _shuffled(end - first, key, epoch, window)
        return epoch * self._pass + first, epoch * self._pass + first + int(order[within - first])

    def states(self, rows: range) -> dict[int, None]:
        """Nothing: the number of a row says all."""
        return {}

    def _span(self, position: int, stop: int) -> Span:
        """The tokens [position, stop) of the documents laid end to end, as far as they are of one document."""
        while position >= self._blocks[-1].ends[-1]:
            self._blocks.append(self._make_block(int(self._blocks[-1].ends[-1]), self._blocks[-1].cursors))
        block = next(block for block in self._blocks if position < block.ends[-1])
        draw = int(np.searchsorted(block.ends, position, side="right"))
        source, index, end = (int(column[draw]) for column in block[:3])
        document = self._plan.tables[source].document(index)
        start = len(document.tokens) - (end - position)
        return document.span(start, start + stop - position, source)

    def _make_block(self, start: int, cursors: np.ndarray) -> _Block:
        choices, sources, indices = self._plan.mixture.draw(0, cursors, _BLOCK)
        lengths = np.empty_like(indices)
        for source, table in enumerate(self._plan.tables):
            chosen = sources == source
            lengths[chosen] = table.lengths[indices[chosen]]
        passed = cursors + np.bincount(choices, minlength=len(cursors))
        return _Block(sources, indices, start + np.cumsum(lengths), passed)
