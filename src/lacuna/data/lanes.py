"""Rows packed while training, in many independent lanes, so that no process needs another's documents."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from lacuna.config import UserError
from lacuna.data.packing import Document, Span
from lacuna.data.plan import Plan
from lacuna.data.stream import PartReader, Snapshot, Stream
from lacuna.data.tokenize import BrokenRecords, document_of

_DRAWN_AHEAD = 64
_MOST_EMPTY = 100_000

LaneState = tuple[int, list[int], list[tuple | None]]
"""Tokens used of the current document, documents passed of each pool, where to read each stream from."""


@dataclass
class _Lane:
    number: int
    offset: int
    cursors: list[int]
    snapshots: list[tuple | None]
    upcoming: Iterator[tuple[int, int, int]] = iter(())
    choice: int = 0
    source: int = 0
    document: Document | None = None

    def pass_document(self) -> None:
        self.cursors[self.choice] += 1
        self.offset = 0
        self.document = None


class LaneRows:
    """The lanes that one worker owns, each from its own state onwards; None is the beginning."""

    def __init__(self, plan: Plan, states: dict[int, LaneState | None]) -> None:
        self._plan = plan
        self._lanes: dict[int, _Lane] = {}
        pools = len(plan.mixture.pools)
        for number, state in states.items():
            offset, cursors, snapshots = state or (0, [0] * pools, [None] * pools)
            lane = self._lanes[number] = _Lane(number, offset, list(cursors), list(snapshots))
            lane.upcoming = self._draws(lane)
        self._readers: dict[tuple[int, int], PartReader] = {}
        self.broken: list[str] = []

    def row(self, number: int) -> list[Span]:
        """The spans of a row, which fill it but at the end of the documents; those of a lane are asked for in order."""
        lane = self._lanes[number % self._plan.mixture.lanes]
        spans, space = [], self._plan.config.training.seq_len
        with suppress(StopIteration):  # where a stream ends, the row is left short
            while space:
                document = lane.document or self._load(lane)
                spans.append(document.span(lane.offset, lane.offset + space, lane.source))
                lane.offset += len(spans[-1].tokens)
                space -= len(spans[-1].tokens)
                if lane.offset == len(document.tokens):
                    lane.pass_document()
        return spans

    def states(self, rows: range) -> dict[int, LaneState]:
        """The state of each row's lane as it is now, by lane."""
        lanes = [self._lanes[row % self._plan.mixture.lanes] for row in rows]
        return {lane.number: (lane.offset, list(lane.cursors), list(lane.snapshots)) for lane in lanes}

    def _draws(self, lane: _Lane) -> Iterator[tuple[int, int, int]]:
        while True:
            drawn = self._plan.mixture.draw(lane.number, lane.cursors, _DRAWN_AHEAD)
            yield from zip(*(array.tolist() for array in drawn), strict=True)

    def _load(self, lane: _Lane) -> Document:
        """The lane's current document, passing over those that are empty or broken."""
        for _ in range(_MOST_EMPTY):
            lane.choice, lane.source, index = next(lane.upcoming)
            documents = self._plan.sources[lane.source]
            if isinstance(self._plan.mixture.pools[lane.choice], Stream):
                record, place, snapshot = self._reader(lane).record(index)
                lane.snapshots[lane.choice] = tuple(snapshot)
            else:
                record, place = documents.dataset[index], f"document {index}"
            lane.document = document_of(documents, record, place, self._plan.tokenizer)
            if lane.document.broken:
                self.broken.append(lane.document.broken)
            if len(lane.document.tokens):
                return lane.document
            lane.pass_document()
        BrokenRecords(self._plan.config.data.max_broken_records).add(self.broken)
        raise UserError(f"{documents.name}: {_MOST_EMPTY} records in a row hold no text; check data.text_column")

    def _reader(self, lane: _Lane) -> PartReader:
        """What reads the stream of the lane's draw, made when first needed and shared by the lanes of its part."""
        choice, stream = lane.choice, self._plan.mixture.pools[lane.choice]
        part, stride = lane.number % stream.parts, self._plan.mixture.lanes // stream.parts
        if (choice, part) not in self._readers:
            sharing = [other for other in self._lanes.values() if other.number % stream.parts == part]
            places = [other.number // stream.parts for other in sharing]
            needs = {p: other.cursors[choice] * stride + p for p, other in zip(places, sharing, strict=True)}
            first = min((Snapshot(*other.snapshots[choice] or ()) for other in sharing), key=lambda start: start.index)
            self._readers[choice, part] = PartReader(stream, part, needs, stride, first)
        return self._readers[choice, part]
