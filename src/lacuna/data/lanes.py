"""Rows packed while training, in many independent lanes, so that no process needs another's documents."""

import copy
from collections.abc import Iterator
from contextlib import suppress

from lacuna.config import UserError
from lacuna.data.packing import Document, Span
from lacuna.data.plan import Plan
from lacuna.data.stream import Stream
from lacuna.data.tokenize import BrokenRecords, document_of

_DRAWN_AHEAD = 64
_MOST_EMPTY = 100_000

LaneState = tuple[int, list[int], list[tuple]]
"""Tokens used of the current document, documents passed of each source, where to read each stream from."""


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
