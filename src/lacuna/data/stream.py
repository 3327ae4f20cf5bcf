"""A part of a streaming dataset read forward, block by block, for the lanes of one worker."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lacuna.config import UserError
from lacuna.data.mixture import Pool, shuffled
from lacuna.data.retry import with_retries
from lacuna.data.sources import Documents

_LOG = logging.getLogger(__name__)
BLOCK = 1024
"""Documents shuffled among each other; they are in memory together."""
_MOST_PARTS = 64


class Snapshot(NamedTuple):
    """Where a part stood at the start of a block: enough to read on from there.

    `index` counts documents over all epochs, `epoch_start` those before this one; `state` is the dataset's own, None
    at the start of an epoch.
    """

    index: int = 0
    epoch_start: int = 0
    state: dict[str, Any] | None = None


StreamRecord = tuple[dict[str, Any], str, Snapshot]
"""A record, its place in the source, and the start of the block that it came in."""


@dataclass(frozen=True)
class Stream(Pool):
    """A streaming source that is split into parts, read once or, when `endless`, again and again.

    A lane always reads the same part: lane l part l mod parts. The lane's ordinal o is document o // parts of the
    part's order: pass after pass, the blocks of each shuffled anew. `sizes` holds the number of parts alone.
    """

    documents: Documents
    retries: int
    endless: bool = True

    @property
    def parts(self) -> int:
        return self.sizes[0]

    def locate(self, ordinals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source and, int64 [n], the document in the lane's part at each ordinal."""
        return np.full_like(ordinals, self.first_source), ordinals // self.parts

    def reader(self, lanes: int, positions: dict[int, tuple[int, tuple]]) -> Callable[[int, int], StreamRecord]:
        """A function that reads parts as far as lanes ask, and keeps for the others what they have not asked for yet.

        Args:
            lanes: how many there are in all.
            positions: for each lane served, the documents it has passed and the snapshot it had last (empty: none).

        Returns:
            A function from a lane and a document in its part to the record, which is then forgotten: each lane asks
            for its documents in their order. Raises StopIteration after the last.
        """
        stride = lanes // self.parts
        needs = {lane: passed * stride + lane // self.parts for lane, (passed, _) in positions.items()}
        starts: dict[int, list[Snapshot]] = {}
        for lane, (_, snapshot) in positions.items():
            starts.setdefault(lane % self.parts, []).append(Snapshot(*snapshot))
        first = {part: min(snapshots, key=lambda snapshot: snapshot.index) for part, snapshots in starts.items()}
        blocks = {part: self.read(part, snapshot, stride) for part, snapshot in first.items()}
        kept: dict[tuple[int, int], StreamRecord] = {}

        def record(lane: int, index: int) -> StreamRecord:
            part = lane % self.parts
            while (part, index) not in kept:
                block = next(blocks[part])
                for number, found in enumerate(block, start=block[0][2].index):
                    if number >= needs.get(number % stride * self.parts + part, number + 1):
                        kept[part, number] = found
            return kept.pop((part, index))

        return record

    def read(self, part: int, first: Snapshot, fewest: int) -> Iterator[list[StreamRecord]]:
        """Yield the blocks of a part, each in shuffled order; after a passing fault a block is read again.

        Raises UserError when there are no documents, and the last fault when reading failed too often. Warns when
        there are less than `fewest` documents.
        """
        name, where = self.documents.name, f"part {part} of {self.parts}"
        shard = self.documents.dataset.shard(self.parts, part)
        start, snapshot = shard.state_dict(), first
        blocks: Iterator[dict[str, list]] | None = None

        def read_block() -> dict[str, list]:
            nonlocal blocks
            if blocks is None:
                shard.load_state_dict(snapshot.state or start)
                blocks = shard.iter(BLOCK)  # not iter(): that leaves parts to torch's other workers
            try:
                return next(blocks, {})
            except Exception:
                blocks = None  # a generator that raised is finished; the next attempt opens the source again
                raise

        while True:
            columns = with_retries(read_block, self.retries, name)
            block = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            index, epoch_start, _ = snapshot
            position = index - epoch_start
            if block:
                order = shuffled(len(block), self.key, part, index)
                yield [(block[n], f"{where}, document {position + n}", snapshot) for n in order]
                snapshot = Snapshot(index + len(block), epoch_start, shard.state_dict())
                continue
            if not position:
                raise UserError(f"{name}: {where} holds no documents; leave out empty files")
            if not self.endless:
                return
            if not epoch_start and index < fewest:
                _LOG.warning(
                    "%s: %s has only %d documents for %d sequences packed in parallel, so that some are seen again "
                    "before others are seen at all; set data.streaming=false for small data",
                    name, where, index, fewest,
                )  # fmt: skip
            snapshot, blocks = Snapshot(index, index), None


def number_of_parts(shard_sizes: tuple[int, ...], lanes: int) -> int:
    """Into how many parts to split a source: as many as go with the lanes and leave the parts about equal.

    Every lane reads one part, so the parts must divide the lanes evenly; and as each part feeds equally many
    lanes, documents of a small part would be seen more often. At most 64.
    """
    best = 1
    for parts in range(2, min(len(shard_sizes), _MOST_PARTS) + 1):
        sizes = [sum(part) for part in np.array_split(np.array(shard_sizes), parts)]
        if lanes % parts == 0 and max(sizes) <= 1.25 * min(sizes):
            best = parts
    return best
