"""The rows of a plan, as spans of documents, by one of two ways."""

import math
from collections.abc import Callable, Iterator
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


def open_rows(plan: Plan, states: dict[int, LaneState | None], broken: list[str]) -> Callable[[int], list[Span]]:
    """A function from the number of a row to its spans, which fill it but at the end of the documents.

    Args:
        states: of the lanes that are read, where each goes on (None: the beginning); kept up to date in place.
        broken: gains the places of unreadable records that were met.
    """
    return LaneRows(plan, states, broken).row if plan.table is None else IndexedRows(plan).row


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
        self._pool_starts = np.cumsum([0, *(pool.size for pool in plan.mixture.pools)])
        self._cursors = np.zeros(len(plan.mixture.pools), dtype=np.int64)
        self._drawn = np.zeros((2, 1), dtype=np.int64)

    def row(self, number: int) -> list[Span]:
        """The spans of a row; rows are asked for in order."""
        length = self._plan.config.training.seq_len
        window, place = self._place(number)
        position, stop = place * length, min((place + 1) * length, self._end)
        if self._drawn[1, -1] < stop:
            self._draw(window * length, stop)
        spans = []
        while position < stop:
            index, end = self._drawn[:, np.searchsorted(self._drawn[1], position, side="right")].tolist()
            document, source = self._plan.table.document(index)
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


class LaneRows:
    """Rows of documents that are tokenised as they come; row R is the next of lane R mod lanes."""

    def __init__(self, plan: Plan, states: dict[int, LaneState | None], broken: list[str]) -> None:
        self._plan, self._states, self._broken = plan, states, broken
        pools = plan.mixture.pools
        starts = {lane: state or (0, [0] * len(pools), [()] * len(pools)) for lane, state in states.items()}
        self._rows = {lane: self._rows_from(lane, *start) for lane, start in starts.items()}
        self._readers = {}
        for source, stream in enumerate(pools):
            if isinstance(stream, Stream):
                positions = {lane: (cursors[source], snaps[source]) for lane, (_, cursors, snaps) in starts.items()}
                self._readers[source] = stream.reader(plan.mixture.lanes, positions)

    def row(self, number: int) -> list[Span]:
        """The spans of a row; those of a lane are asked for in order."""
        lane = number % self._plan.mixture.lanes
        spans, self._states[lane] = next(self._rows[lane])
        return spans

    def _rows_from(
        self, lane: int, offset: int, cursors: list[int], snapshots: list[tuple]
    ) -> Iterator[tuple[list[Span], LaneState]]:
        """The rows of a lane from a state on, each with the state after it."""
        cursors, snapshots = list(cursors), list(snapshots)
        spans, space = [], self._plan.config.training.seq_len
        for source, document in self._documents(lane, cursors, snapshots):
            while offset < len(document.tokens):
                spans.append(document.span(offset, offset + space, source))
                offset += len(spans[-1].tokens)
                space -= len(spans[-1].tokens)
                if not space:
                    yield spans, (offset, list(cursors), list(snapshots))
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
                drawn = self._plan.mixture.draw(lane, cursors, _DRAWN_AHEAD)
                for source, index in np.transpose(drawn).tolist():
                    documents = self._plan.sources[source]
                    if source in self._readers:
                        (record, place), snapshot = self._readers[source](lane, index)
                        snapshots[source] = tuple(snapshot)
                    else:
                        record, place = documents.dataset[index], index
                    document = document_of(record, place, documents, self._plan.tokenizer)
                    if document.broken:
                        self._broken.append(document.broken)
                    in_vain = 0 if len(document.tokens) else in_vain + 1
                    yield source, document
            BrokenRecords(self._plan.config.data.max_broken_records).add(self._broken)
            raise UserError(f"{documents.name}: {in_vain} records in a row hold no text; check data.text_column")
