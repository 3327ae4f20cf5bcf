"""Batches for the training loop: workers, hand-out in order, and a resume state that fits any world size."""

import atexit
import itertools
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fsspec.asyn
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.data.cache import usable_cores
from lacuna.data.indexed import IndexedRows
from lacuna.data.lanes import LaneRows, LaneState
from lacuna.data.packing import Batch
from lacuna.data.plan import Plan, make_plan
from lacuna.data.tokenize import BrokenRecords

_STEPS_BEFORE_A_LANE_RETURNS = 8
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

    def lanes(self, plan: Plan, first: int = 0, every: int = 1) -> list[int]:
        """The lanes that every n-th of a rank's micro-batches comes from, beginning with the first, in order."""
        numbers = range(first, first + _STEPS_BEFORE_A_LANE_RETURNS * self.accumulation, every)
        return list(dict.fromkeys(row % plan.mixture.lanes for number in numbers for row in self.rows(number)))


def open_rows(plan: Plan, states: dict[int, LaneState | None]) -> IndexedRows | LaneRows:
    """What makes the rows of a plan, with the lanes of `states` where it has lanes."""
    return IndexedRows(plan) if plan.tables else LaneRows(plan, states)


class _MicroBatches(IterableDataset):
    """A rank's micro-batches from the first on, of which each worker makes every n-th."""

    def __init__(self, plan: Plan, layout: Layout, first: int, lanes: dict[int, LaneState | None]) -> None:
        self._plan = plan
        self._layout = layout
        self._first = first
        self._lanes = lanes

    def __iter__(self) -> Iterator[Batch | UserError]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first = self._first + number
        own = self._layout.lanes(self._plan, first, workers)
        try:
            rows = open_rows(self._plan, {lane: self._lanes[lane] for lane in own})
            for micro_batch in itertools.count(first, workers):
                numbers = self._layout.rows(micro_batch)
                batch = self._plan.batch([rows.row(row) for row in numbers])
                lanes = {row % self._plan.mixture.lanes for row in numbers}
                state = {lane: rows.states[lane] for lane in lanes}
                yield replace(batch, broken_records=tuple(rows.broken), state=state)
                rows.broken.clear()
        except UserError as error:
            yield error  # raised where the batch is handed out: a worker would bury it in a traceback


class Loader:
    """The endless training batches of one rank, `accumulation` micro-batches for each step."""

    def __init__(self, plan: Plan, layout: Layout, workers: int) -> None:
        self._plan = plan
        self._layout = layout
        self._workers = workers
        self._broken = BrokenRecords(plan.config.data.max_broken_records)
        self._handed_out = 0
        self._batches: Iterator[Batch | UserError] | None = None
        self._lanes: dict[int, LaneState | None] = dict.fromkeys(layout.lanes(plan))

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps until every document was trained on; None when that is not known."""
        tokens = self._plan.tokens_per_pass
        return tokens and -(-tokens // (self._layout.global_batch * self._plan.config.training.seq_len))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        batch = next(self._batches)
        if isinstance(batch, UserError):
            raise batch
        self._lanes |= batch.state
        self._broken.add(batch.broken_records)
        self._handed_out += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """A small state of this rank, of plain numbers, after the batches handed out so far, at the end of a step."""
        steps, within = divmod(self._handed_out, self._layout.accumulation)
        assert within == 0, "a position is saved between steps, not between the micro-batches of one"
        return {
            "signature": self._plan.signature(self._layout.global_batch),
            "steps": steps,
            "lanes": dict(self._lanes),
            "broken_records": list(self._broken.places),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `merge_states` made of all ranks' states, of this world size or another.

        Raises UserError when the state belongs to other data.
        """
        own = self._plan.signature(self._layout.global_batch)
        saved = state["signature"]
        changed = [f"{name} (was {saved[name]}, is {own[name]})" for name in own if saved[name] != own[name]]
        if changed:
            raise UserError(
                f"the checkpoint's position in the data does not fit this run: {', '.join(changed)} changed; "
                "undo the change, or start a new run with checkpoint.initial_load_path"
            )
        self.close()
        self._handed_out = state["steps"] * self._layout.accumulation
        self._lanes = {lane: state["lanes"][lane] for lane in self._lanes}
        self._broken = BrokenRecords(self._broken.limit)
        self._broken.add(state["broken_records"])

    def close(self) -> None:
        """Stop the workers, which otherwise end with the process."""
        if self._batches is not None:
            self._stop()
        self._batches = None

    def _start(self) -> Iterator[Batch | UserError]:
        dataset = _MicroBatches(self._plan, self._layout, self._handed_out, dict(self._lanes))
        options: dict[str, Any] = {}
        if self._workers:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before the fork, or tokenizers complains
            prefetch = self._plan.config.data.prefetch_factor
            options = {"num_workers": self._workers, "prefetch_factor": prefetch, "worker_init_fn": _start_worker}
        # A generator of its own: else every start of a loader draws from the one that dropout draws from.
        batches = iter(DataLoader(dataset, batch_size=None, generator=torch.Generator(), **options))
        self._stop = weakref.finalize(self, _stop_workers, batches)
        return batches


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state out of those of all ranks, from which any number of ranks can go on with the same global batch."""
    assert len({state["steps"] for state in states}) == 1, "ranks saved at different steps"
    return states[0] | {
        "lanes": {lane: saved for state in states for lane, saved in state["lanes"].items()},
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
) -> Loader:
    """The training batches of a rank; they depend on the rank's place in the global batch, never on the workers.

    Args:
        micro_batch: sequences per micro-batch of this rank.
        accumulation: micro-batches per step.
        global_batch: sequences per step over all ranks, micro_batch * accumulation * dp_world.

    Raises UserError when the data cannot be opened.
    """
    assert micro_batch * accumulation * dp_world == global_batch, "the global batch is what the ranks make of it"
    plan = make_plan(config, tokenizer, config.data.resolved_sources(), global_batch * _STEPS_BEFORE_A_LANE_RETURNS)
    layout = Layout(global_batch, micro_batch, accumulation, dp_rank)
    return Loader(plan, layout, _number_of_workers(config.data.num_workers, plan, accumulation))


def _number_of_workers(wanted: int | None, plan: Plan, accumulation: int) -> int:
    """As many as wanted, or as fit the machine and the work; lanes only go with a divisor of their period."""
    if plan.tables:
        size = sum(table.dataset.data.nbytes for table in plan.tables)
        return wanted if wanted is not None else int(size > _READ_IN_PROCESS)
    if wanted is None:
        wanted = min(_MOST_WORKERS, max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1))
    period = _STEPS_BEFORE_A_LANE_RETURNS * accumulation
    return max((divisor for divisor in range(1, wanted + 1) if period % divisor == 0), default=0)


def _start_worker(worker: int) -> None:
    """Leave signals to the trainer, which stops its workers itself, but do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fsspec.asyn.reset_lock()  # a lock of the parent's that may have been held at the fork
    threading.Thread(target=_end_with_parent, daemon=True).start()
    atexit.register(os._exit, 0)  # where workers are not forked, Python's own end aborts now and then in C++ threads


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _stop_workers(batches: Any) -> None:
    """End the workers of torch's iterator: in good order if they listen, by force if they are busy."""
    workers = getattr(batches, "_workers", ())
    if workers:
        batches._shutdown_workers()
    for worker in workers:
        worker.kill()
        worker.join()
