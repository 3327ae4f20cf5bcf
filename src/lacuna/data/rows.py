"""The rows of a plan, as spans of documents, by one of two ways."""

import copy
import math
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from lacuna.config import UserError
from lacuna.data.mixture import shuffled
from lacuna.data.packing import Document, Span
from lacuna.data.plan import Plan
from lacuna.data.stream import Stream
from lacuna.data.tokenize import BrokenRecords, document_of

_WINDOW = 8192
_DRAWN_AT_ONCE = 16384
_DRAWN_AHEAD = 64
_MOST_EMPTY = 100_000

LaneState = tuple[int, list[int], list[tuple]]
"""Tokens used of the current document, documents passed of each source, where to read each stream from."""


def open_rows(plan: Plan, states: dict[int, LaneState | None]) -> "IndexedRows | LaneRows":
    """What makes the rows of a plan, with the lanes of `states` where it has lanes."""
    return IndexedRows(plan) if plan.tables else LaneRows(plan, states)


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
        self.moved: dict[int, LaneState] = {}
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
            drawn = np.stack([sources, indices, end + np.cumsum(lengths)])
            kept.append(drawn[:, drawn[2] > start])
            end = int(drawn[2, -1])
            self._cursors += np.bincount(choices, minlength=len(self._cursors))
        self._drawn = np.concatenate(kept, axis=1)


class LaneRows:
    """The lanes that one worker owns, each from its own state onwards; None is the beginning.

    `moved` collects the states of the lanes that rows were taken from, `broken` where unreadable records were found.
    """

    def __init__(self, plan: Plan, states: dict[int, LaneState | None]) -> None:
        self._plan = plan
        self.moved: dict[int, LaneState] = {}
        self.broken: list[str] = []
        pools = plan.mixture.pools
        starts = {lane: state or (0, [0] * len(pools), [()] * len(pools)) for lane, state in states.items()}
        self._rows = {lane: self._rows_from(lane, *copy.deepcopy(start)) for lane, start in starts.items()}
        self._readers = {}
        for source, stream in enumerate(pools):
            if isinstance(stream, Stream):
                positions = {lane: (cursors[source], snaps[source]) for lane, (_, cursors, snaps) in starts.items()}
                self._readers[source] = stream.reader(plan.mixture.lanes, positions)

    def row(self, number: int) -> list[Span]:
        """The spans of a row, which fill it but at the end of the documents; those of a lane are asked for in order."""
        lane = number % self._plan.mixture.lanes
        spans, self.moved[lane] = next(self._rows[lane])
        return spans

    def _rows_from(
        self, lane: int, offset: int, cursors: list[int], snapshots: list[tuple]
    ) -> Iterator[tuple[list[Span], LaneState]]:
        """The rows of a lane from a state on, each with the state after it."""
        spans, space = [], self._plan.config.training.seq_len
        for source, document in self._documents(lane, cursors, snapshots):
            while offset < len(document.tokens):
                spans.append(document.span(offset, offset + space, source))
                offset += len(spans[-1].tokens)
                space -= len(spans[-1].tokens)
                if not space:
                    yield spans, (offset, list(cursors), [*map(tuple, snapshots)])
                    spans, space = [], self._plan.config.training.seq_len
            cursors[source] += 1
            offset = 0
        while True:  # after the last document there are empty rows
            yield spans, (offset, cursors, snapshots)
            spans = []

    def _documents(self, lane: int, cursors: list[int], snapshots: list[tuple]) -> Iterator[tuple[int, Document]]:
        """The documents that a lane draws, each with its source; the caller counts them in `cursors`."""
        in_vain = 0
        with suppress(StopIteration):  # where a stream ends
            while in_vain < _MOST_EMPTY:
                _, *drawn = self._plan.mixture.draw(lane, cursors, _DRAWN_AHEAD)
                for source, index in zip(*(array.tolist() for array in drawn), strict=True):
                    documents = self._plan.sources[source]
                    if source in self._readers:
                        record, place, snapshots[source] = self._readers[source](lane, index)
                    else:
                        record, place = documents.dataset[index], f"document {index}"
                    document = document_of(documents, record, place, self._plan.tokenizer)
                    if document.broken:
                        self.broken.append(document.broken)
                    in_vain = 0 if len(document.tokens) else in_vain + 1
                    yield source, document
            BrokenRecords(self._plan.config.data.max_broken_records).add(self.broken)
            raise UserError(f"{documents.name}: {in_vain} records in a row hold no text; check data.text_column")
