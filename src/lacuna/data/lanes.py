"""Rows of documents that are tokenised while training, each lane of documents by itself."""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from lacuna.config import UserError
from lacuna.data.mixture import shuffled
from lacuna.data.packing import Document, Span, fill_rows
from lacuna.data.plan import Plan
from lacuna.data.stream import BEGINNING, Snapshot, Stream
from lacuna.data.tokenize import add_broken, document_of

_DRAWN_AHEAD = 64
_MOST_EMPTY = 100_000
_FILL = 0.98  # of the buffer: examples that filled it whole would take a row more, nearly empty

# How many documents of each source have been passed, and where to read each stream from.
Place = tuple[list[int], list[Snapshot]]
# A place, and before it what was used from there on: tokens of a document, or rows of examples fitted together.
LaneState = tuple[int, list[int], list[Snapshot]]


class LaneRows:
    """Rows of documents that are tokenised as they come; row R is the next of lane R mod lanes."""

    def __init__(self, plan: Plan, states: dict[int, LaneState | None], broken: list[str]) -> None:
        self._plan, self._states, self._broken = plan, states, broken
        pools = plan.mixture.pools
        starts = {lane: state or (0, [0] * len(pools), [BEGINNING] * len(pools)) for lane, state in states.items()}
        self._readers = {}
        for source, stream in enumerate(pools):
            if isinstance(stream, Stream):
                positions = {lane: (cursors[source], snaps[source]) for lane, (_, cursors, snaps) in starts.items()}
                self._readers[source] = stream.reader(plan.mixture.lanes, positions)
        rows = self._fitted if plan.fits else self._laid_end_to_end
        self._rows = {lane: rows(lane, *start) for lane, start in starts.items()}

    def row(self, number: int) -> list[Span]:
        """The spans of a row, none after the last document; those of a lane are asked for in order."""
        lane = number % self._plan.mixture.lanes
        spans, self._states[lane] = next(self._rows[lane], ([], None))
        return spans

    def _laid_end_to_end(self, lane: int, offset: int, *place: list) -> Iterator[tuple[list[Span], LaneState]]:
        """The rows of a lane from a state on, each with the state after it."""
        spans, space = [], self._plan.config.training.seq_len
        for source, document, after in self._documents(lane, *place):
            while offset < len(document.tokens):
                spans.append(document.span(offset, offset + space, source))
                offset += len(spans[-1].tokens)
                space -= len(spans[-1].tokens)
                if not space:
                    yield spans, (offset, *place)
                    spans, space = [], self._plan.config.training.seq_len
            offset, place = 0, after
        yield spans, (0, *place)

    def _fitted(self, lane: int, used: int, *place: list) -> Iterator[tuple[list[Span], LaneState]]:
        """The same with whole examples, as many of which are fitted together as fill the buffer."""
        config = self._plan.config
        drawn = self._documents(lane, *place)
        while True:
            examples, tokens = [], 0
            for example in drawn:
                examples.append(example)
                tokens += min(len(example[1].tokens), config.training.seq_len)
                if tokens >= _FILL * config.packing.buffer * config.training.seq_len:
                    break
            if not examples:
                return
            sources, documents, places = zip(*examples, strict=True)
            bins = fill_rows(np.array([len(document.tokens) for document in documents]), documents.__getitem__, config)
            order = shuffled(len(bins), self._plan.mixture.pools[0].key, lane, sum(place[0]))
            for row in range(used, len(bins)):
                pieces = bins[order[row]].T.tolist()
                spans = [documents[number].span(*part, sources[number]) for number, *part in pieces]
                yield spans, (row + 1, *place) if row + 1 < len(bins) else (0, *places[-1])
            used, place = 0, places[-1]

    def _documents(
        self, lane: int, cursors: list[int], snapshots: list[Snapshot]
    ) -> Iterator[tuple[int, Document, Place]]:
        """The documents that a lane draws, each with its source and the place after it."""
        in_vain = 0
        with suppress(StopIteration):  # where a stream ends
            while in_vain < _MOST_EMPTY:
                drawn = self._plan.mixture.draw(lane, cursors, _DRAWN_AHEAD)
                for source, index in np.transpose(drawn).tolist():
                    cursors, snapshots = list(cursors), list(snapshots)
                    documents = self._plan.sources[source]
                    if source in self._readers:
                        record, number, snapshots[source] = self._readers[source](lane, index)
                    else:
                        record, number = documents.dataset[index], index
                    document = document_of(record, number, documents, self._plan.tokenizer)
                    if document.broken:
                        self._broken.append(document.broken)
                    in_vain = 0 if len(document.tokens) else in_vain + 1
                    cursors[source] += 1
                    yield source, document, (cursors, snapshots)
            add_broken({}, self._broken, self._plan.config.data.max_broken_records)
            raise UserError(f"{documents.name}: {in_vain} records in a row hold no text; check data.text_column")
