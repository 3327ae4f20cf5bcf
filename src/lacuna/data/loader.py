"""Batches for training, made by workers, with a resume state that fits any world size; and for validation."""

import atexit
import itertools
import math
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import fsspec.asyn
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, RunError, UserError, refuse
from lacuna.config.cores import usable_cores
from lacuna.data.document import Span
from lacuna.data.packing import Batch
from lacuna.data.plan import Plan, make_plan
from lacuna.data.rows import LaneState, documents_begun, open_rows, rows_from_the_start
from lacuna.data.tokenize import add_broken

_STEPS_BEFORE_A_LANE_RETURNS = 8
_MOST_WORKERS = 8
_READ_IN_PROCESS = 2**30


@dataclass(frozen=True)
class BatchPlan:
    """`global_batch` sequences a step = `micro_batch` × `accumulation` × data-parallel ranks."""

    micro_batch: int
    accumulation: int
    global_batch: int


@dataclass(eq=False)
class _MicroBatches(IterableDataset):
    """A rank's micro-batches from its position on, of which each worker makes every n-th.

    Step t trains on the rows [t * global_batch, (t + 1) * global_batch) of its `batch`; each rank
    takes a contiguous part of them, and each of its micro-batches a contiguous part of that. A run
    by epochs has its `last` row, with which its last step ends: the rows that are left are shared
    alike, and padded, maybe to micro-batches without any. The position is the `first` row that this
    loader began with, the number of micro-batches that are `done` since, and the states of the
    rank's `lanes` after them; `before` it other loaders of the run gave that many rows.
    """

    plan: Plan
    batch: BatchPlan
    dp_rank: int
    last: int | None = None
    before: int = 0
    first: int = 0
    done: int = 0
    lanes: dict[int, LaneState | None] = field(default_factory=dict)

    def rows_of_step(self, step: int) -> range:
        """The rows of all ranks in a step, counted as `done` is: fewer in the last one, then none."""
        size, end = (
            self.batch.global_batch,
            math.inf if self.last is None else self.last - self.before,
        )
        first = min(self.first + step * size, end)
        return range(first, min(first + size, end))

    def filled(self, step: int) -> int:
        """How many micro-batches of a step have rows, on the rank that has most."""
        at_once = self.batch.global_batch // self.batch.accumulation
        return -(-len(self.rows_of_step(step)) // at_once)

    def rows(self, number: int) -> range:
        """The rows of a micro-batch, counted from the beginning of training."""
        step, within = divmod(number, self.batch.accumulation)
        all_rows, filled = self.rows_of_step(step), self.filled(step)
        first = (self.dp_rank * filled + within) * self.batch.micro_batch
        return all_rows[first : first + self.batch.micro_batch] if within < filled else range(0)

    def own_lanes(self, first: int = 0, every: int = 1) -> set[int]:
        """The lanes that every n-th micro-batch comes from, beginning with the first."""
        numbers = range(
            first, first + _STEPS_BEFORE_A_LANE_RETURNS * self.batch.accumulation, every
        )
        return {row % self.plan.mixture.lanes for number in numbers for row in self.rows(number)}

    def __iter__(
        self,
    ) -> Iterator[tuple[Batch | UserError, dict[int, LaneState | None], list[str]]]:
        """Yields each with the states of the lanes it moved, and the places of unreadable records met on the way."""
        worker = get_worker_info()
        first, workers = (self.done + worker.id, worker.num_workers) if worker else (self.done, 1)
        try:
            states = {lane: self.lanes.get(lane) for lane in self.own_lanes(first, workers)}
            broken: list[str] = []
            row = open_rows(self.plan, states, broken)
            for micro_batch in itertools.count(first, workers):
                numbers = self.rows(micro_batch)
                missing: list[list[Span]] = [[]] * (self.batch.micro_batch - len(numbers))
                batch = self.plan.batch([row(number) for number in numbers] + missing)
                moved = {
                    lane: states[lane]
                    for lane in (number % self.plan.mixture.lanes for number in numbers)
                }
                yield batch, moved, broken.copy()
                broken.clear()
        except UserError as error:
            yield (
                error,
                {},
                [],
            )  # raised where the batch is handed out: a worker would bury it in a traceback


class Loader:
    """The endless training batches of one rank, `accumulation` micro-batches for each step; its `plan` of the rows."""

    def __init__(self, source: _MicroBatches, workers: int) -> None:
        self.plan, self._source, self._workers = source.plan, source, workers
        self._broken: dict[str, None] = {}
        self._batches: Iterator[tuple] | None = None

    @property
    def rows_done(self) -> int:
        """The rows of all ranks in the steps so far."""
        return self._source.rows_of_step(self._source.done // self._source.batch.accumulation).start

    @property
    def rows_left(self) -> int | None:
        """Rows of all ranks until the end of a run by epochs; None in one by steps."""
        last = self._source.last
        return None if last is None else max(last - self._source.before - self.rows_done, 0)

    @property
    def filled(self) -> int:
        """Of the micro-batches of the next step, as many have rows on any rank; what follows is padding on all."""
        return self._source.filled(self._source.done // self._source.batch.accumulation)

    def next_step(self, whole: bool = False) -> list[Batch]:
        """The micro-batches of the next step; those of padding alone only where it must be `whole`."""
        filled = None if whole else self.filled
        batches = [next(self) for _ in range(self._source.batch.accumulation)]
        return batches[:filled]

    def every_batch(self) -> Iterator[Batch]:
        """This rank's micro-batches of one pass over all documents; the position stays where it is."""
        source = self._source
        plan = replace(self.plan, endless=False)
        own = slice(
            source.dp_rank * source.batch.micro_batch,
            (source.dp_rank + 1) * source.batch.micro_batch,
        )
        at_once = source.batch.global_batch // source.batch.accumulation
        for rows in rows_from_the_start(plan, at_once):
            yield plan.batch(rows[own])

    def documents_begun(self) -> np.ndarray:
        """How often each document of the table was begun by now, on all ranks, int64 [documents]."""
        return documents_begun(self.plan, self.rows_done)

    def follow(self, earlier: "Loader") -> None:
        """Take the place of an earlier loader: the run ends where it would have."""
        self._source.last, self._source.before = (
            earlier._source.last,
            earlier._source.before + earlier.rows_done,
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            os.environ.setdefault(
                "TOKENIZERS_PARALLELISM", "false"
            )  # before the fork, or tokenizers complains
            prefetch = self.plan.config.data.prefetch_factor if self._workers else None
            # A generator of its own: else every start of a loader draws from the one that dropout
            # draws from.
            self._batches = iter(
                DataLoader(
                    self._source,
                    batch_size=None,
                    collate_fn=tuple,
                    num_workers=self._workers,
                    prefetch_factor=prefetch,
                    worker_init_fn=_start_worker,
                    generator=torch.Generator(),
                )
            )
            self._stop = weakref.finalize(self, _stop_workers, self._batches)
        try:
            batch, moved, broken = next(self._batches)
        except (
            ConnectionError,
            EOFError,
        ) as error:  # from the pipe to a worker, where its end is not yet known
            if not self._workers or "Caught" in str(
                error
            ):  # what a worker met itself, torch tells so
                raise
            raise RuntimeError("DataLoader worker is killed") from error
        if isinstance(batch, UserError):
            raise batch
        self._source.lanes |= moved
        self._source.done += 1
        add_broken(self._broken, broken, self.plan.config.data.max_broken_records)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """A small state of this rank, of plain numbers, after the batches handed out so far, at the end of a step."""
        between = self._source.done % self._source.batch.accumulation == 0
        assert between, "a position is saved between steps, not between the micro-batches of one"
        return {
            "signature": self.plan.signature(self._source.batch.global_batch),
            "rows": self.rows_done,
            "rows_before": self._source.before,
            "lanes": dict(self._source.lanes),
            "broken_records": list(self._broken),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `merge_states` made of all ranks' states, of this world size or another.

        Raises UserError when the state belongs to other data.
        """
        source = self._source
        own, saved = self.plan.signature(source.batch.global_batch), state["signature"]
        differing = [name for name in saved | own if saved.get(name) != own.get(name)]
        changed = [f"{name} (was {saved.get(name)}, is {own.get(name)})" for name in differing]
        wrong = f"the checkpoint's position in the data does not fit this run: {', '.join(changed)} changed"
        mend = "undo the change, or start a new run with checkpoint.initial_load_path"
        refuse({f"{wrong}; {mend}": bool(changed)})
        self.close()
        source.first, source.done, source.before = state["rows"], 0, state["rows_before"]
        source.lanes = {lane: state["lanes"].get(lane) for lane in source.own_lanes()}
        self._broken = dict.fromkeys(state["broken_records"])

    def close(self) -> None:
        """Stop the workers, which otherwise end with the process."""
        if self._batches is not None:
            self._stop()
        self._batches = None


def of_a_worker(error: BaseException) -> bool:
    """Whether an error tells that a data worker has ended: torch raises it wherever the process happens to be."""
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


@contextmanager
def workers_told() -> Iterator[None]:
    """Within it, the end of a data worker is one message: torch raises an error of its own, out of a signal handler."""
    try:
        yield
    except RuntimeError as error:
        if not of_a_worker(error):
            raise
        said = str(error).partition("\n")[0].rstrip(". ")
        raise RunError(
            f"{said}. Where memory ran out, fewer workers (data.num_workers) or less in advance (data.prefetch_factor) "
            f"take less; the same command goes on from the last checkpoint."
        ) from error


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state out of those of all ranks, from which any number of ranks can go on with the same global batch."""
    assert len({state["rows"] for state in states}) == 1, "ranks saved at different steps"
    lanes = {lane: saved for state in states for lane, saved in state["lanes"].items()}
    return states[0] | {
        "lanes": lanes,
        "broken_records": [p for state in states for p in state["broken_records"]],
    }


def build_loader(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    batch: BatchPlan,
    dp_rank: int,
    order: np.ndarray | None = None,
) -> Loader:
    """The training batches of a rank; they depend on the rank's place in the global batch, never on the workers.

    With an `order`, int64 [documents], documents come in that. Raises UserError when the data
    cannot be opened.
    """
    lanes = batch.global_batch * _STEPS_BEFORE_A_LANE_RETURNS
    plan = make_plan(config, tokenizer, config.data.resolved_sources(), lanes, order=order)
    workers = _number_of_workers(config.data.num_workers, plan, batch.accumulation)
    last = config.training.epochs and config.training.epochs * plan.rows_per_pass
    return Loader(_MicroBatches(plan, batch, dp_rank, last), workers)


def build_validation(
    config: Config, tokenizer: PreTrainedTokenizerBase, batch: BatchPlan, dp_rank: int
) -> Callable[[], Iterator[Batch]]:
    """A function that goes over the validation batches of one rank, the same each time: every token of the set once.

    There are equally many on every rank, in micro-batches like those of training, and at most
    validation.steps. Documents come in the source's order, packed like the training data; where
    rows are missing at the end there are rows of padding, whose labels are all -100. Raises
    UserError when the data cannot be opened or holds no text.
    """
    plan = make_plan(
        config, tokenizer, [config.validation.resolved_source()], lanes=1, endless=False
    )
    most = None if config.validation.steps < 0 else config.validation.steps
    own = slice(dp_rank * batch.micro_batch, (dp_rank + 1) * batch.micro_batch)

    def batches() -> Iterator[Batch]:
        for rows in itertools.islice(
            rows_from_the_start(plan, batch.global_batch // batch.accumulation), most
        ):
            yield plan.batch(rows[own])

    return batches


def _number_of_workers(wanted: int | None, plan: Plan, accumulation: int) -> int:
    """As many as wanted, or as fit the machine and the work; lanes only go with a divisor of their period."""
    if plan.table:
        return (
            wanted if wanted is not None else int(plan.table.dataset.data.nbytes > _READ_IN_PROCESS)
        )
    if wanted is None:
        wanted = min(
            _MOST_WORKERS, max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1)
        )
    period = _STEPS_BEFORE_A_LANE_RETURNS * accumulation
    return max((divisor for divisor in range(1, wanted + 1) if period % divisor == 0), default=0)


def _start_worker(worker: int) -> None:
    """Leave signals to the trainer, which stops its workers itself; torch has them end within seconds of its death."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fsspec.asyn.reset_lock()  # a lock of the parent's that may have been held at the fork
    atexit.register(
        os._exit, 0
    )  # where workers are not forked, Python's own end aborts now and then in C++ threads


def _stop_workers(batches: Any) -> None:
    """End the workers of torch's iterator: in good order if they listen, by force if they are busy."""
    if workers := getattr(batches, "_workers", ()):
        batches._shutdown_workers()
    for worker in workers:
        worker.kill()
        worker.join()
