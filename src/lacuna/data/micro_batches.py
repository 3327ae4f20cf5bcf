"""Which rows each micro-batch of each rank has, and the micro-batches as workers make them."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.utils.data import IterableDataset, get_worker_info

from lacuna.config import UserError
from lacuna.data.document import Span
from lacuna.data.packing import Batch
from lacuna.data.plan import RowPlan
from lacuna.data.rows import LaneState, open_rows

STEPS_BEFORE_A_LANE_RETURNS = 8


@dataclass(frozen=True)
class BatchSizes:
    """`global_batch` sequences a step = `micro_batch` × `accumulation` × data-parallel ranks."""

    micro_batch: int
    accumulation: int
    global_batch: int


# A micro-batch, or the mistake that was met instead; the states of the lanes that it moved; and the
# places of unreadable records that were met on the way.
Made = tuple[Batch | UserError, dict[int, LaneState | None], list[str]]


@dataclass(eq=False)
class MicroBatches(IterableDataset[Made]):
    """The micro-batches of a rank from its position on, of which each worker makes every n-th.

    Step t trains on the rows from t * global_batch on, as many as global_batch. Each rank takes a
    contiguous part of them, and each of its micro-batches a contiguous part of that.

    Attributes:
        last: in a run by epochs, the row with which its last step ends. The rows that are left for
            that step are shared evenly and padded; micro-batches may be padding alone.
        before: how many rows other loaders of the run gave before this one.
        first: the row that this loader began with.
        done: how many micro-batches it has given since.
        lanes: the states of the rank's lanes after those micro-batches.
    """

    plan: RowPlan
    batch: BatchSizes
    dp_rank: int
    last: int | None = None
    before: int = 0
    first: int = 0
    done: int = 0
    lanes: dict[int, LaneState | None] = field(default_factory=dict)

    def rows_of_step(self, step: int) -> range:
        """The rows of all ranks in a step since this loader began; fewer in the last, then none."""
        size = self.batch.global_batch
        first = self.first + step * size
        if self.last is None:
            return range(first, first + size)
        end = self.last - self.before
        first = min(first, end)
        return range(first, min(first + size, end))

    def filled(self, step: int) -> int:
        """How many micro-batches of a step have rows, on the rank with the most of them."""
        at_once = self.batch.global_batch // self.batch.accumulation
        return math.ceil(len(self.rows_of_step(step)) / at_once)

    def rows(self, number: int) -> range:
        """The rows of a micro-batch, counted from the beginning of training."""
        step, within = divmod(number, self.batch.accumulation)
        filled = self.filled(step)
        if within >= filled:
            return range(0)
        first = (self.dp_rank * filled + within) * self.batch.micro_batch
        return self.rows_of_step(step)[first : first + self.batch.micro_batch]

    def own_lanes(self, first: int = 0, every: int = 1) -> set[int]:
        """The lanes that micro-batches take rows from: number `first` and `every` n-th after it."""
        period = STEPS_BEFORE_A_LANE_RETURNS * self.batch.accumulation
        return {
            self._lane_of(row)
            for number in range(first, first + period, every)
            for row in self.rows(number)
        }

    def _lane_of(self, row: int) -> int:
        return row % self.plan.mixture.lanes

    def __iter__(self) -> Iterator[Made]:
        """Yields the micro-batches of this process, which may be one of several workers."""
        worker = get_worker_info()
        first = self.done
        workers = 1
        if worker is not None:
            first = self.done + worker.id
            workers = worker.num_workers
        try:
            states = {lane: self.lanes.get(lane) for lane in self.own_lanes(first, workers)}
            broken: list[str] = []
            row = open_rows(self.plan, states, broken)
            for micro_batch in itertools.count(first, workers):
                numbers = self.rows(micro_batch)
                missing: list[list[Span]] = [[]] * (self.batch.micro_batch - len(numbers))
                batch = self.plan.batch([row(number) for number in numbers] + missing)
                moved = {lane: states[lane] for lane in map(self._lane_of, numbers)}
                yield batch, moved, broken.copy()
                broken.clear()
        except UserError as error:
            # Raised where the batch is handed out: a worker would bury it in a traceback.
            yield error, {}, []
