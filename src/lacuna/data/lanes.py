"""Rows of documents that are tokenised while training, each lane of documents by itself."""

import copy
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from lacuna.config import UserError
from lacuna.data.bins import fill_rows
from lacuna.data.mixture import shuffled
from lacuna.data.packing import Document, Span
from lacuna.data.plan import Plan
from lacuna.data.stream import BEGINNING, Snapshot, Stream
from lacuna.data.tokenize import add_broken, document_of

_DRAWN_AHEAD = 64
_MOST_EMPTY = 100_000
_FILL = 0.98  # of the buffer: examples that filled it whole would take a row more, nearly empty

# Documents passed of each source, where to read each stream from, and before these what was used since then: tokens
# of the current document, or rows of the examples that were fitted together.
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
        self._rows = {lane: rows(lane, start) for lane, start in starts.items()}

    def row(self, number: int) -> list[Span]:
        """The spans of a row, none after the last document; those of a lane are asked for in order."""
        lane = number % self._plan.mixture.lanes
        spans, self._states[lane] = next(self._rows[lane], ([], None))
        return spans

    def _laid_end_to_end(self, lane: int, state: LaneState) -> Iterator[tuple[list[Span], LaneState]]:
        """The rows of a lane from a state on, each with the state after it."""
        offset, cursors, snapshots = copy.deepcopy(state)
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
        yield spans, (offset, cursors, snapshots)

    def _fitted(self, lane: int, state: LaneState) -> Iterator[tuple[list[Span], LaneState]]:
        """The same with whole examples, as many of which are fitted together as fill the buffer."""
        used, cursors, snapshots = copy.deepcopy(state)
        config = self._plan.config
        drawn = self._documents(lane, cursors, snapshots)
        while True:
            before, examples, tokens = (list(cursors), list(snapshots)), [], 0
            for source, document in drawn:
                cursors[source] += 1
                examples.append((document, source))
                tokens += min(len(document.tokens), config.training.seq_len)
                if tokens >= _FILL * config.packing.buffer * config.training.seq_len:
                    break
            if not examples:
                return
            documents = [document for document, _ in examples]
            bins = fill_rows(np.array([len(document.tokens) for document in documents]), documents.__getitem__, config)
            order = shuffled(len(bins), self._plan.mixture.pools[0].key, lane, sum(before[0]))
            for row in range(used, len(bins)):
                after = (row + 1, *before) if row + 1 < len(bins) else (0, list(cursors), list(snapshots))
                pieces = bins[order[row]].T.tolist()
                yield [documents[number].span(*part, examples[number][1]) for number, *part in pieces], after
            used = 0

    def _documents(self, lane: int, cursors: list[int], snapshots: list[Snapshot]) -> Iterator[tuple[int, Document]]:
        """The documents that a lane draws, each with its source; the caller counts them in `cursors`."""
        in_vain = 0
        with suppress(StopIteration):  # where a stream ends
            while in_vain < _MOST_EMPTY:
                drawn = self._plan.mixture.draw(lane, cursors, _DRAWN_AHEAD)
                for source, index in np.transpose(drawn).tolist():
                    documents = self._plan.sources[source]
                    if source in self._readers:
                        record, place, snapshots[source] = self._readers[source](lane, index)
                    else:
                        record, place = documents.dataset[index], index
                    document = document_of(record, place, documents, self._plan.tokenizer)
                    if document.broken:
                        self._broken.append(document.broken)
                    in_vain = 0 if len(document.tokens) else in_vain + 1
                    yield source, document
            add_broken({}, self._broken, self._plan.config.data.max_broken_records)
            raise UserError(f"{documents.name}: {in_vain} records in a row hold no text; check data.text_column")
