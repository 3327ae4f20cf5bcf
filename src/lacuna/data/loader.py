"""Batches for the training loop: workers, hand-out in order, and a resume state that fits any world size."""

import atexit
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fsspec.asyn
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.data.cache import usable_cores
from lacuna.data.indexed import IndexedPlan, IndexedRows
from lacuna.data.lanes import LaneRows, Snapshots
from lacuna.data.packing import Batch, Packing
from lacuna.data.plan import STEPS_BEFORE_A_LANE_RETURNS, Plan, make_plan, packing_of, signature
from lacuna.data.stream import Snapshot, newest_before
from lacuna.data.tokenize import BrokenRecords

_MOST_WORKERS = 8
_READ_IN_PROCESS = 2**30


@dataclass(frozen=True)
class Layout:
    """Which rows of the endless order each micro-batch of a rank consists of.

    Step t trains on the rows [t * global_batch, (t + 1) * global_batch); each rank takes a contiguous part of
    them, and each of its micro-batches a contiguous part of that.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    dp_rank: int

    def rows(self, micro_batch: int) -> range:
        """The rows of a rank's micro-batch, counted from the beginning of training."""
        step, within = divmod(micro_batch, self.accumulation)
        first = step * self.global_batch + (self.dp_rank * self.accumulation + within) * self.micro_batch
        return range(first, first + self.micro_batch)


@dataclass(frozen=True)
class Start:
    """Where to begin: after so many steps, the lanes in these states, with these starts of streams."""

    steps: int
    lanes: dict[int, np.ndarray]
    snapshots: Snapshots


class _MicroBatches(IterableDataset):
    """A rank's micro-batches from `start` on, of which each worker makes every n-th."""

    def __init__(self, plan: Plan, layout: Layout, packing: Packing, start: Start) -> None:
        self._plan = plan
        self._layout = layout
        self._packing = packing
        self._start = start

    def __iter__(self) -> Iterator[Batch | UserError]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first = self._start.steps * self._layout.accumulation + number
        try:
            if isinstance(self._plan, IndexedPlan):
                yield from self._indexed(itertools.count(first, workers))
            else:
                yield from self._packed_in_lanes(first, workers)
        except UserError as error:
            yield error  # raised where the batch is handed out: a worker would bury it in a traceback

    def _indexed(self, micro_batches: Iterator[int]) -> Iterator[Batch]:
        rows = IndexedRows(self._plan)
        for micro_batch in micro_batches:
            yield self._packing.batch([rows.row(row) for row in self._layout.rows(micro_batch)])

    def _packed_in_lanes(self, first: int, workers: int) -> Iterator[Batch]:
        lanes = self._plan.mixture.lanes
        period = STEPS_BEFORE_A_LANE_RETURNS * self._layout.accumulation
        own = {row % lanes for q in range(first, first + period, workers) for row in self._layout.rows(q)}
        rows = LaneRows(self._plan, {lane: self._start.lanes[lane] for lane in own}, self._start.snapshots)
        for micro_batch in itertools.count(first, workers):
            numbers = self._layout.rows(micro_batch)
            batch = self._packing.batch([rows.row(row) for row in numbers])
            state = (rows.states(numbers), rows.take_snapshots())
            yield replace(batch, broken_records=rows.broken.take_new(), state=state)


class Loader:
    """The endless training batches of one rank, `accumulation` micro-batches for each step."""

    def __init__(self, plan: Plan, layout: Layout, packing: Packing, workers: int, options: dict[str, Any]) -> None:
        self._plan = plan
        self._layout = layout
        self._packing = packing
        self._workers = workers
        self._options = options
        self._broken = BrokenRecords(getattr(plan, "max_broken_records", 0))
        self._handed_out = 0
        self._batches: Iterator[Batch | UserError] | None = None
        self._snapshots: Snapshots = {}
        self._lanes: dict[int, np.ndarray] = {}
        if not isinstance(plan, IndexedPlan):
            zeros = np.zeros(plan.state_width, dtype=np.int64)
            period = range(STEPS_BEFORE_A_LANE_RETURNS * layout.accumulation)
            self._lanes = {row: zeros for micro_batch in period for row in layout.rows(micro_batch)}

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps until every document was trained on; None when that is not known."""
        tokens = self._plan.tokens_per_pass if isinstance(self._plan, IndexedPlan) else None
        return tokens and -(-tokens // (self._layout.global_batch * self._packing.row_length))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        batch = next(self._batches)
        if isinstance(batch, UserError):
            raise batch
        if batch.state is not None:
            self._remember(batch)
        self._handed_out += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """A small state of this rank, of plain numbers, after the batches handed out so far, at the end of a step."""
        steps, within = divmod(self._handed_out, self._layout.accumulation)
        assert within == 0, "a position is saved between steps, not between the micro-batches of one"
        return {
            "signature": signature(self._plan, self._layout.global_batch),
            "steps": steps,
            "lanes": list(self._lanes),
            "lane_states": [state.tolist() for state in self._lanes.values()],
            "snapshots": {key: [tuple(snapshot) for snapshot in taken] for key, taken in self._snapshots.items()},
            "broken_records": list(self._broken.places),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `merge_states` made of all ranks' states, of this world size or another.

        Raises UserError when the state belongs to other data.
        """
        own = signature(self._plan, self._layout.global_batch)
        changed = [f"{name} (was {value}, is {own.get(name)})" for name, value in state["signature"].items()
                   if own.get(name) != value]  # fmt: skip
        if changed:
            raise UserError(
                f"the checkpoint's position in the data does not fit this run: {', '.join(changed)} changed; "
                "undo the change, or start a new run with checkpoint.initial_load_path"
            )
        self.close()
        self._handed_out = state["steps"] * self._layout.accumulation
        saved = dict(zip(state["lanes"], state["lane_states"], strict=True))
        self._lanes = {lane: np.array(saved[lane], dtype=np.int64) for lane in self._lanes}
        self._snapshots = {key: [Snapshot(*fields) for fields in taken] for key, taken in state["snapshots"].items()}
        self._broken.places = list(state["broken_records"])

    def close(self) -> None:
        """Stop the workers, which otherwise end with the process."""
        if self._batches is not None:
            self._stop()
        self._batches = None

    def _start(self) -> Iterator[Batch | UserError]:
        start = Start(self._handed_out // self._layout.accumulation, dict(self._lanes), dict(self._snapshots))
        dataset = _MicroBatches(self._plan, self._layout, self._packing, start)
        if self._workers:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before the fork, or tokenizers complains
        # A generator of its own: else every start of a loader draws from the one that dropout draws from.
        options = self._options | {"generator": torch.Generator()}
        batches = iter(DataLoader(dataset, batch_size=None, num_workers=self._workers, **options))
        self._stop = weakref.finalize(self, _stop_workers, batches)
        return batches

    def _remember(self, batch: Batch) -> None:
        """Take over the state that the lanes of a batch were left in."""
        states, snapshots = batch.state
        rows = self._layout.rows(self._handed_out)
        self._lanes.update(zip((row % self._plan.mixture.lanes for row in rows), states, strict=True))
        for (choice, number), new in snapshots.items():
            known = {s.index: s for s in [*self._snapshots.get((choice, number), ()), *new]}
            oldest = newest_before(known.values(), self._need(choice, number)).index
            self._snapshots[choice, number] = [known[index] for index in sorted(known) if index >= oldest]
        for place in batch.broken_records:
            self._broken.add(place)
        self._broken.report()

    def _need(self, choice: int, number: int) -> int:
        """The first document of a substream that one of this rank's lanes still needs."""
        parts, lanes = len(self._plan.pools[choice]), self._plan.mixture.lanes
        return min(
            (int(state[2 + choice]) * lanes + lane) // parts
            for lane, state in self._lanes.items()
            if lane % parts == number
        )


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state out of those of all ranks, from which any number of ranks can go on with the same global batch."""
    first = states[0]
    assert all(state["steps"] == first["steps"] for state in states), "ranks saved at different steps"
    snapshots: dict[tuple[int, int], dict[int, Any]] = {}
    for state in states:
        for key, taken in state["snapshots"].items():
            snapshots.setdefault(key, {}).update((index, (index, *rest)) for index, *rest in taken)
    return first | {
        "lanes": [lane for state in states for lane in state["lanes"]],
        "lane_states": [lane for state in states for lane in state["lane_states"]],
        "snapshots": {key: [taken[index] for index in sorted(taken)] for key, taken in snapshots.items()},
        "broken_records": sorted({place for state in states for place in state["broken_records"]}),
    }


def build_loader(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dp_rank: int,
    dp_world: int,
    micro_batch: int,
    accumulation: int,
    global_batch: int,
    device: str = "cpu",
) -> Loader:
    """The training batches of a rank; they depend on the rank's place in the global batch, never on the workers.

    Args:
        micro_batch: sequences per micro-batch of this rank.
        accumulation: micro-batches per step.
        global_batch: sequences per step over all ranks, micro_batch * accumulation * dp_world.
        device: where batches will go; for cuda they come in pinned memory.

    Raises UserError when the data cannot be opened.
    """
    assert micro_batch * accumulation * dp_world == global_batch, "the global batch is what the ranks make of it"
    plan = make_plan(config, tokenizer, global_batch)
    workers = _number_of_workers(config.data.num_workers, plan, accumulation)
    options: dict[str, Any] = {"pin_memory": device.startswith("cuda")}
    if workers:
        options |= {"prefetch_factor": config.data.prefetch_factor, "worker_init_fn": _start_worker}
    layout = Layout(global_batch, micro_batch, accumulation, dp_rank)
    packing = packing_of(config, tokenizer, sources=len(config.data.resolved_sources()))
    return Loader(plan, layout, packing, workers, options)


def _number_of_workers(wanted: int | None, plan: Plan, accumulation: int) -> int:
    """As many as wanted, or as fit the machine and the work; lanes only go with a divisor of their period."""
    if isinstance(plan, IndexedPlan):
        return wanted if wanted is not None else int(plan.size > _READ_IN_PROCESS)
    if wanted is None:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        wanted = min(_MOST_WORKERS, max(1, usable_cores() // ranks_here - 1))
    period = STEPS_BEFORE_A_LANE_RETURNS * accumulation
    return max((divisor for divisor in range(1, wanted + 1) if period % divisor == 0), default=0)


def _start_worker(worker: int) -> None:
    """Leave signals to the trainer, which stops its workers itself, but do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fsspec.asyn.reset_lock()  # a lock of the parent's that may have been held at the fork
    threading.Thread(target=_end_with_parent, daemon=True).start()
    atexit.register(os._exit, 0)  # where workers are not forked, Python's own end aborts now and then in C++ threads


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in workers only"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _stop_workers(batches: Any) -> None:
    """End the workers of torch's iterator: in good order if they listen, by force if they are busy."""
    workers = getattr(batches, "_workers", ())
    if workers:
        batches._shutdown_workers()
    for worker in workers:
        worker.kill()
        worker.join()
