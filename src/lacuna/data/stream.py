"""A part of a streaming dataset read forward, block by block, for the lanes of one worker."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from datasets import IterableDataset

from lacuna.config import UserError
from lacuna.data.files import BROKEN
from lacuna.data.mixture import permute, random_key
from lacuna.data.retry import with_retries

_LOG = logging.getLogger(__name__)
BLOCK = 1024
"""Documents shuffled among each other; they are in memory together."""
_MOST_SUBSTREAMS = 64


class Snapshot(NamedTuple):
    """Where a substream stood at the start of a block: enough to read on from there.

    `index` counts documents over all epochs, `position` those of the `epoch`; `state` is the dataset's own, None
    at the start of an epoch.
    """

    index: int
    epoch: int
    position: int
    state: dict[str, Any] | None


@dataclass(frozen=True)
class Substream:
    """Part `number` of the `parts` that a streaming source is split into.

    A lane always reads the same part: lane l part l mod parts. The lane's ordinal o is document o // parts of the
    part's endless order: pass after pass, the blocks of each shuffled anew.
    """

    source: int
    name: str
    column: str
    dataset: IterableDataset
    parts: int
    number: int
    key: int | None
    retries: int

    def read(self, first: Snapshot, fewest: int) -> Iterator[tuple[Snapshot, list[tuple[Any, str]]]]:
        """Yield each block's snapshot and its records in shuffled order, (value, place in the source), for ever.

        Raises UserError when there are no documents, and the last fault when reading failed too often. Warns when
        there are less than `fewest` documents.
        """
        shard = self.dataset.shard(self.parts, self.number)
        start = shard.state_dict()
        index, epoch, position, state = first
        while True:
            for batch, following in read_pass(shard, state or start, self.retries, self.name):
                count = len(batch[self.column])
                order = self._order(count, epoch, position)
                yield Snapshot(index, epoch, position, state), [self._record(batch, position, i) for i in order]
                index, position, state = index + count, position + count, following
            if not position:
                raise UserError(
                    f"{self.name}: part {self.number} of {self.parts} holds no documents; leave out empty files"
                )
            if not epoch and position < fewest:
                _LOG.warning(
                    "%s: part %d of %d has only %d documents for %d sequences packed in parallel, so that some are "
                    "seen again before others are seen at all; set data.streaming=false for small data",
                    self.name, self.number, self.parts, position, fewest,
                )  # fmt: skip
            epoch, position, state = epoch + 1, 0, None

    def _order(self, count: int, epoch: int, position: int) -> np.ndarray:
        natural = np.arange(count, dtype=np.int64)
        if self.key is None:
            return natural
        key = random_key(self.key, self.number, epoch, position)
        return permute(natural, count, np.full(count, key, dtype=np.uint64))

    def _record(self, batch: dict[str, list], position: int, number: int) -> tuple[Any, str]:
        broken = batch[BROKEN][number] if BROKEN in batch else None
        place = broken or f"{self.name}, part {self.number} of {self.parts}, document {position + int(number)}"
        return batch[self.column][number], place


class SubstreamReader:
    """Reads a substream as far as its lanes ask, and keeps for them what they have not asked for yet.

    Args:
        needs: for each lane served, its place among the lanes of the substream and the first index it still needs.
        stride: lanes of the substream; index i belongs to the lane at place i mod stride.
        snapshots: known starts; the newest that is early enough for every lane is read from.
    """

    def __init__(self, substream: Substream, needs: dict[int, int], stride: int, snapshots: Iterable[Snapshot]) -> None:
        self._needs = needs
        self._stride = stride
        self._kept: dict[int, tuple[Any, str]] = {}
        self._new_snapshots: list[Snapshot] = []
        self._blocks = substream.read(newest_before(snapshots, min(needs.values())), stride)

    def record(self, index: int) -> tuple[Any, str]:
        """The record at an index, which is then forgotten: each is asked for once."""
        while index not in self._kept:
            snapshot, records = next(self._blocks)
            self._new_snapshots.append(snapshot)
            for offset, record in enumerate(records, start=snapshot.index):
                if offset >= self._needs.get(offset % self._stride, offset + 1):
                    self._kept[offset] = record
        return self._kept.pop(index)

    def take_snapshots(self) -> list[Snapshot]:
        """The snapshots of the blocks read since the last call."""
        taken, self._new_snapshots = self._new_snapshots, []
        return taken


def read_pass(
    dataset: IterableDataset, state: dict[str, Any], retries: int, name: str
) -> Iterator[tuple[dict[str, list], dict[str, Any]]]:
    """The blocks of the rest of one pass over a dataset, by column, each with the dataset's state after it.

    After a passing fault the block is read again from where it starts.
    """
    iterator: Iterator[dict[str, list]] | None = None

    def read_block() -> dict[str, list] | None:
        nonlocal iterator
        if iterator is None:
            dataset.load_state_dict(state)
            iterator = dataset.iter(BLOCK)
        try:
            return next(iterator, None)
        except Exception:
            iterator = None  # a generator that raised is finished; the next attempt opens the source again
            raise

    while (block := with_retries(read_block, retries, name)) is not None:
        state = dataset.state_dict()
        yield block, state


def newest_before(snapshots: Iterable[Snapshot], index: int) -> Snapshot:
    """The newest snapshot from which the document at `index` can still be reached."""
    beginning = Snapshot(index=0, epoch=0, position=0, state=None)
    return max((s for s in snapshots if s.index <= index), key=lambda s: s.index, default=beginning)


def number_of_parts(shard_sizes: tuple[int, ...], lanes: int) -> int:
    """Into how many substreams to split a source: as many as go with the lanes and leave the parts about equal.

    Every lane reads one part, so the parts must divide the lanes evenly; and as each part feeds equally many
    lanes, documents of a small part would be seen more often. At most 64.
    """
    best = 1
    for parts in range(2, min(len(shard_sizes), _MOST_SUBSTREAMS) + 1):
        sizes = [sum(part) for part in np.array_split(np.array(shard_sizes), parts)]
        if lanes % parts == 0 and max(sizes) <= 1.25 * min(sizes):
            best = parts
    return best
