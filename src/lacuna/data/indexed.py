"""Rows cut from tokenised documents laid end to end: any row can be made at once, in any process."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lacuna.data.cache import TokenTable
from lacuna.data.mixture import Mixture, Pool
from lacuna.data.packing import IGNORED, Span

_BLOCK = 16384
_BLOCKS_KEPT = 4


class _Block(NamedTuple):
    """Consecutive draws: sources, documents in them, and where each ends in the endless run of tokens."""

    sources: np.ndarray
    indices: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class IndexedPlan:
    """Everything that decides the rows of tokenised sources; `mixture` has one lane."""

    mixture: Mixture
    pools: tuple[Pool, ...]
    tables: tuple[TokenTable, ...]
    row_length: int

    @property
    def tokens_per_pass(self) -> int | None:
        """Tokens of all documents together; None when sources are mixed by weight and so have no common pass."""
        return sum(int(table.lengths.sum()) for table in self.tables) if len(self.pools) == 1 else None

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(table.dataset.data.nbytes for table in self.tables)


class IndexedRows:
    """Row R is the tokens [R * row_length, (R + 1) * row_length) of all drawn documents laid end to end."""

    def __init__(self, plan: IndexedPlan) -> None:
        self._plan = plan
        self._starts = [0]
        self._cursors = [np.zeros(len(plan.pools), dtype=np.int64)]
        self._blocks: dict[int, _Block] = {}

    def row(self, number: int) -> list[Span]:
        """The spans of a row, which always fill it."""
        return self.spans(number * self._plan.row_length, (number + 1) * self._plan.row_length)

    def spans(self, position: int, stop: int) -> list[Span]:
        """The spans of the tokens [position, stop) of the endless run of documents."""
        spans = []
        while position < stop:
            block = self._block_of(position)
            first = int(np.searchsorted(block.ends, position, side="right"))
            last = int(np.searchsorted(block.ends, stop, side="left"))
            for draw in range(first, min(last + 1, len(block.ends))):
                end = int(block.ends[draw])
                if end > position:
                    span = self._span(int(block.sources[draw]), int(block.indices[draw]), position, end, stop)
                    spans.append(span)
                    position += len(span.tokens)
        return spans

    def _span(self, source: int, index: int, position: int, end: int, stop: int) -> Span:
        table = self._plan.tables[source]
        length = int(table.lengths[index])
        start = length - (end - position)
        count = min(end, stop) - position
        tokens = table.tokens(index, start, start + count + 1)
        following = int(tokens[count]) if len(tokens) > count else IGNORED
        return Span(tokens[:count], following, source, table.text_bytes(index) * count / length)

    def _block_of(self, position: int) -> _Block:
        """The block that holds a position; blocks are walked from the beginning, but once only."""
        while True:
            number = bisect_right(self._starts, position) - 1
            block = self._block(number)
            if position < block.ends[-1]:
                return block

    def _block(self, number: int) -> _Block:
        if number in self._blocks:
            return self._blocks[number]
        plan = self._plan
        drawn, ordinals = plan.mixture.draw(0, number * _BLOCK, self._cursors[number], _BLOCK)
        sources, indices, lengths = np.empty((3, _BLOCK), dtype=np.int64)
        for choice, pool in enumerate(plan.pools):
            chosen = drawn == choice
            sources[chosen], indices[chosen] = pool.locate(ordinals[chosen])
        for source, table in enumerate(plan.tables):
            chosen = sources == source
            lengths[chosen] = table.lengths[indices[chosen]]
        block = _Block(sources, indices, self._starts[number] + np.cumsum(lengths))
        if number + 1 == len(self._starts):
            self._starts.append(int(block.ends[-1]))
            self._cursors.append(self._cursors[number] + np.bincount(drawn, minlength=len(plan.pools)))
        self._blocks[number] = block
        if len(self._blocks) > _BLOCKS_KEPT:
            del self._blocks[next(iter(self._blocks))]
        return block
