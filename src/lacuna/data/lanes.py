"""Rows packed while training, in many independent lanes, so that no process needs another's documents."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from lacuna.config import UserError
from lacuna.data.files import BROKEN
from lacuna.data.mixture import Mixture, Pool
from lacuna.data.packing import IGNORED, Span
from lacuna.data.sources import Documents
from lacuna.data.stream import Snapshot, Substream, SubstreamReader
from lacuna.data.tokenize import BrokenRecords, Document, document_of

_DRAWN_AHEAD = 64
_MOST_EMPTY = 100_000

Snapshots = dict[tuple[int, int], list[Snapshot]]
"""Starts to read on from, by source and substream."""


@dataclass(frozen=True)
class LanePlan:
    """Everything that decides the rows of sources tokenised while training.

    Row R is the next row of lane R mod `mixture.lanes`. `pools` holds a local pool or, for a streaming source, its
    substreams; draw by draw the mixture chooses one of them.
    """

    mixture: Mixture
    sources: tuple[Documents, ...]
    pools: tuple[Pool | tuple[Substream, ...], ...]
    row_length: int
    tokenizer: PreTrainedTokenizerBase
    max_broken_records: int

    @property
    def state_width(self) -> int:
        """Numbers in the state of a lane: draws done, tokens used of the current document, draws from each pool."""
        return 2 + len(self.pools)


@dataclass
class _Lane:
    number: int
    draws: int
    offset: int
    cursors: np.ndarray
    document: Document | None = None
    source: int = 0
    upcoming: deque[tuple[int, int, int]] = field(default_factory=deque)

    def state(self) -> tuple[int, ...]:
        return (self.draws, self.offset, *map(int, self.cursors))

    def pass_document(self) -> None:
        self.draws += 1
        self.cursors[self.upcoming.popleft()[0]] += 1
        self.offset = 0
        self.document = None


class LaneRows:
    """The lanes that one worker owns, each from its own state onwards.

    Args:
        states: int64 [state_width] of every lane owned, by lane; zeros are the beginning.
        snapshots: of the streaming sources, from a checkpoint.
    """

    def __init__(self, plan: LanePlan, states: dict[int, np.ndarray], snapshots: Snapshots) -> None:
        self._plan = plan
        self._lanes = {n: _Lane(n, int(s[0]), int(s[1]), s[2:].astype(np.int64)) for n, s in states.items()}
        self._snapshots = snapshots
        self._readers: dict[tuple[int, int], SubstreamReader] = {}
        self.broken = BrokenRecords(plan.max_broken_records)

    def row(self, number: int) -> list[Span]:
        """The spans of a row, which always fill it. The rows of a lane must be asked for in order."""
        lane = self._lanes[number % self._plan.mixture.lanes]
        spans, space = [], self._plan.row_length
        while space:
            document = lane.document or self._load(lane)
            start, stop = lane.offset, min(lane.offset + space, len(document.tokens))
            ended = stop == len(document.tokens)
            following = IGNORED if ended else int(document.tokens[stop])
            share = document.text_bytes * (stop - start) / len(document.tokens)
            spans.append(Span(document.tokens[start:stop], following, lane.source, share))
            space -= stop - start
            lane.offset = stop
            if ended:
                lane.pass_document()
        return spans

    def states(self, rows: Iterable[int]) -> np.ndarray:
        """int64 [rows, state_width]: the state of each row's lane as it is now."""
        return np.array([self._lanes[row % self._plan.mixture.lanes].state() for row in rows], dtype=np.int64)

    def take_snapshots(self) -> Snapshots:
        """The snapshots taken since the last call."""
        return {key: taken for key, reader in self._readers.items() if (taken := reader.take_snapshots())}

    def _load(self, lane: _Lane) -> Document:
        """The lane's current document; those that are empty or broken are passed over."""
        for _ in range(_MOST_EMPTY):
            if not lane.upcoming:
                lane.upcoming.extend(self._draw(lane))
            choice, lane.source, index = lane.upcoming[0]
            documents = self._plan.sources[lane.source]
            if documents.streaming:
                parts = len(self._plan.pools[choice])
                value, place = self._reader(choice, lane.number % parts).record(index // parts)
            else:
                record = documents.dataset[index]
                value, place = record[documents.column], record.get(BROKEN) or f"{documents.name}, document {index}"
            lane.document = document_of(value, place, documents.pretokenised, self._plan.tokenizer, self.broken)
            if lane.document is not None:
                return lane.document
            lane.pass_document()
        raise UserError(f"{documents.name}: {_MOST_EMPTY} records in a row hold no text; check data.text_column")

    def _draw(self, lane: _Lane) -> Iterable[tuple[int, int, int]]:
        """The lane's next draws: choice, source, and the document in it (the ordinal where it is a stream)."""
        choices, index = self._plan.mixture.draw(lane.number, lane.draws, lane.cursors, _DRAWN_AHEAD)
        sources = np.empty_like(choices)
        for choice, pool in enumerate(self._plan.pools):
            chosen = choices == choice
            if isinstance(pool, Pool):
                sources[chosen], index[chosen] = pool.locate(index[chosen])
            else:
                sources[chosen] = pool[0].source
        return zip(choices.tolist(), sources.tolist(), index.tolist(), strict=True)

    def _reader(self, choice: int, number: int) -> SubstreamReader:
        """The reader of a substream, made when it is first needed and shared by the lanes that it feeds."""
        if (choice, number) not in self._readers:
            parts, lanes = len(self._plan.pools[choice]), self._plan.mixture.lanes
            needs = {
                lane.number // parts: (int(lane.cursors[choice]) * lanes + lane.number) // parts
                for lane in self._lanes.values()
                if lane.number % parts == number
            }
            substream = self._plan.pools[choice][number]
            known = self._snapshots.get((choice, number), ())
            self._readers[choice, number] = SubstreamReader(substream, needs, lanes // parts, known)
        return self._readers[choice, number]
