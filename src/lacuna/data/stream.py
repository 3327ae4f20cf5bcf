"""A part of a streaming dataset read forward, block by block, for the lanes of one worker."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from lacuna.config import UserError, logger
from lacuna.data.document import PlacedRecord, Snapshot
from lacuna.data.faults import with_retries
from lacuna.data.mixture import shuffled
from lacuna.data.sources import Documents

# Documents shuffled among each other; they are in memory together.
BLOCK = 1024
_MOST_PARTS = 64


@dataclass(frozen=True)
class Stream:
    """A streaming source that is split into parts, read once or, when `endless`, again and again.

    `size` is the number of parts. Lane l always reads part l mod size, in turn with the other lanes
    that read it. A part is read pass after pass, and each block is shuffled anew in each pass.
    """

    size: int
    key: int | None
    documents: Documents
    retries: int
    endless: bool = True

    def reader(
        self, lanes: int, positions: dict[int, tuple[int, Snapshot]]
    ) -> Callable[[int], PlacedRecord]:
        """A function that reads parts as far as lanes ask, and keeps what other lanes will ask for.

        Args:
            lanes: how many there are in all.
            positions: for each lane served, the documents it has passed and the snapshot it had
                last.

        Returns:
            A function from a lane to its next record. Raises StopIteration after the last.
        """
        stride = lanes // self.size
        begins = {
            lane: passed * stride + lane // self.size for lane, (passed, _) in positions.items()
        }
        kept: dict[int, deque[PlacedRecord]] = {lane: deque() for lane in positions}
        parts: dict[int, Iterator[tuple[int, PlacedRecord]]] = {}
        for part in {lane % self.size for lane in positions}:
            snapshots = [last for lane, (_, last) in positions.items() if lane % self.size == part]
            parts[part] = self.read(part, min(snapshots, key=itemgetter(0)), stride)

        def next_record(lane: int) -> PlacedRecord:
            while not kept[lane]:
                number, record = next(parts[lane % self.size])
                asker = number % stride * self.size + lane % self.size
                if asker in kept and number >= begins[asker]:
                    kept[asker].append(record)
            return kept[lane].popleft()

        return next_record

    def read(self, part: int, first: Snapshot, fewest: int) -> Iterator[tuple[int, PlacedRecord]]:
        """Yields the records of a part, shuffled in blocks, and their numbers.

        After a passing fault no record is repeated. Raises UserError when there are no documents,
        and the last fault when reading failed too often. Warns of fewer than `fewest` documents.
        """
        name = self.documents.name
        where = f"part {part} of {self.size}"
        shard = self.documents.dataset.shard(self.size, part)
        beginning = shard.state_dict()
        index, epoch_start, state = first

        def blocks_from_here() -> Iterator[dict[str, list[Any]]]:
            shard.load_state_dict(state or beginning)
            # Not iter(shard): that leaves parts to torch's other workers.
            blocks: Iterator[dict[str, list[Any]]] = shard.iter(BLOCK)
            return blocks

        while True:
            for columns in with_retries(blocks_from_here, self.retries, name):
                snapshot = (index, epoch_start, state)
                records = list(zip(*columns.values(), strict=True))
                order = shuffled(len(records), self.key, part, index).tolist()
                for number, chosen in enumerate(order, index):
                    record = dict(zip(columns, records[chosen], strict=True))
                    yield number, (record, f"{index - epoch_start + chosen} of {where}", snapshot)
                index += len(records)
                state = shard.state_dict()
            if index == epoch_start:
                raise UserError(f"{name}: {where} holds no documents; leave out empty files.")
            if not self.endless:
                return
            if not epoch_start and index < fewest:
                logger.warning(
                    "%s: %s has only %d documents for %d sequences packed in parallel, so that "
                    "some repeat early; set data.streaming=false for small data",
                    name,
                    where,
                    index,
                    fewest,
                )
            epoch_start = index
            state = None


def number_of_parts(shard_sizes: tuple[int, ...], lanes: int) -> int:
    """Into how many parts to split a source: as many as go with the lanes and are about equal.

    Every lane reads one part, so the parts must divide the lanes evenly; and as each part feeds
    equally many lanes, documents of a small part would be seen more often. At most 64.
    """

    def fit(parts: int) -> bool:
        sizes = [sum(part) for part in np.array_split(np.array(shard_sizes), parts)]
        return lanes % parts == 0 and max(sizes) <= 1.25 * min(sizes)

    return max(filter(fit, range(1, min(len(shard_sizes), _MOST_PARTS) + 1)))
