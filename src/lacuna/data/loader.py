"""Batches for training, from whose state any number of ranks can go on; and for validation."""

import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.data.micro_batches import STEPS_BEFORE_A_LANE_RETURNS, BatchSizes, Made, MicroBatches
from lacuna.data.mixture import Mixture, Pool
from lacuna.data.packing import Batch
from lacuna.data.plan import RowPlan, make_row_plan
from lacuna.data.rows import documents_begun, rows_from_the_start
from lacuna.data.tokenize import add_broken
from lacuna.data.workers import (
    start_method,
    start_worker,
    stop_workers,
    workers_for_lanes,
    workers_for_table,
)


class Loader:
    """The endless training batches of one rank, `accumulation` micro-batches for each step.

    Attributes:
        plan: what decides the rows.
        batch: how many of them a step has.
    """

    def __init__(self, source: MicroBatches, workers: int) -> None:
        self.plan = source.plan
        self.batch = source.batch
        self._source = source
        self._workers = workers
        self._broken: dict[str, None] = {}
        self._batches: Iterator[Made] | None = None

    @property
    def _steps_done(self) -> int:
        """Steps whose batches this loader has handed out."""
        return self._source.done // self._source.batch.accumulation

    @property
    def rows_done(self) -> int:
        """The rows of all ranks in the steps so far."""
        return self._source.rows_of_step(self._steps_done).start

    @property
    def rows_left(self) -> int | None:
        """Rows of all ranks until the end of a run by epochs; None in one by steps."""
        last = self._source.last
        return None if last is None else max(last - self._source.before - self.rows_done, 0)

    @property
    def filled(self) -> int:
        """How many micro-batches of the next step have rows on any rank; the others are padding."""
        return self._source.filled(self._steps_done)

    def documents_begun(self) -> np.ndarray:
        """How often all ranks have begun each document by now, int64 [documents of the table]."""
        return documents_begun(self.plan, self.rows_done)

    def take_place_of(self, earlier: "Loader") -> None:
        """Takes over from an earlier loader: the run ends where it would have ended with that."""
        self._source.last = earlier._source.last
        self._source.before = earlier._source.before + earlier.rows_done

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start_making()
            self._stop = weakref.finalize(self, stop_workers, self._batches)
        try:
            batch, moved, broken = next(self._batches)
        except (ConnectionError, EOFError) as error:
            # The pipe to a worker broke, whose end torch has not noticed yet. If torch says that it
            # caught the error in a worker, it is another one.
            if not self._workers or "Caught" in str(error):
                raise
            raise RuntimeError("DataLoader worker is killed") from error
        if isinstance(batch, UserError):
            raise batch
        self._source.lanes |= moved
        self._source.done += 1
        add_broken(self._broken, broken, self.plan.data.max_broken_records)
        return batch

    def next_step(self, whole: bool = False) -> list[Batch]:
        """The micro-batches of the next step; those of padding alone only if it is `whole`."""
        filled = None if whole else self.filled
        batches = [next(self) for _ in range(self._source.batch.accumulation)]
        return batches[:filled]

    def every_batch(self) -> Iterator[Batch]:
        """This rank's micro-batches of one pass over all documents; the position stays as it is.

        Raises UserError where only the endless order of the documents is known.
        """
        plan = replace(self.plan, endless=False)
        if plan.table is not None:
            # sources that are mixed by weight have no pass in common, but as one they have
            everything = Pool(len(plan.table.lengths), None)
            plan = replace(plan, mixture=Mixture(plan.mixture.seed, (everything,), (1.0,), lanes=1))
        elif not plan.data.streaming:
            raise UserError(
                "data.tokenization: before training comes a pass over all data, which needs the "
                "cache; set it to cache."
            )
        return _batches_of_a_pass(plan, self._source.batch, self._source.dp_rank)

    def _start_making(self) -> Iterator[Made]:
        """Starts to make batches where the source stands, in as many processes as are set."""
        # Before the fork, or tokenizers complains.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        prefetch = self.plan.data.prefetch_factor if self._workers else None
        loader = DataLoader(
            self._source,
            batch_size=None,
            collate_fn=tuple,
            num_workers=self._workers,
            multiprocessing_context=start_method(self._workers),
            prefetch_factor=prefetch,
            worker_init_fn=start_worker,
            # Without a generator of its own, every start would draw from that of dropout.
            generator=torch.Generator(),
        )
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """A small state of this rank, of plain numbers, after the batches handed out so far.

        It may only be asked for between two steps.
        """
        is_between = self._source.done % self._source.batch.accumulation == 0
        assert is_between, "a position is saved between steps, not between micro-batches of one"
        return {
            "signature": self.plan.signature(self._source.batch.global_batch),
            "rows": self.rows_done,
            "rows_before": self._source.before,
            "lanes": dict(self._source.lanes),
            "broken_records": list(self._broken),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state that `merge_states` made, of as many ranks as now or another number.

        Raises UserError when the state belongs to other data.
        """
        source = self._source
        saved = state["signature"]
        own = self.plan.signature(source.batch.global_batch)
        changed = [
            f"{name} (was {saved.get(name)}, is {own.get(name)})"
            for name in saved | own
            if saved.get(name) != own.get(name)
        ]
        if changed:
            raise UserError(
                "the checkpoint's position in the data does not fit this run: "
                f"{', '.join(changed)} changed; undo the change, or start a new run with "
                "checkpoint.initial_load_path."
            )
        self.close()
        source.first = state["rows"]
        source.done = 0
        source.before = state["rows_before"]
        source.lanes = {lane: state["lanes"].get(lane) for lane in source.own_lanes()}
        self._broken = dict.fromkeys(state["broken_records"])

    def close(self) -> None:
        """Stops the workers, which otherwise end with the process."""
        if self._batches is not None:
            self._stop()
        self._batches = None


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state out of those of all ranks.

    Any number of ranks can go on from it with the same global batch.
    """
    assert len({state["rows"] for state in states}) == 1, "ranks saved at different steps"
    lanes: dict[int, Any] = {}
    broken: list[str] = []
    for state in states:
        lanes |= state["lanes"]
        broken += state["broken_records"]
    return states[0] | {"lanes": lanes, "broken_records": broken}


def build_loader(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    batch: BatchSizes,
    dp_rank: int,
    order: np.ndarray | None = None,
) -> Loader:
    """The training batches of a rank.

    They depend on the rank's place in the global batch, never on the workers. With an `order`,
    int64 [documents], documents come in that order. Raises UserError when the data cannot be
    opened.
    """
    lanes = batch.global_batch * STEPS_BEFORE_A_LANE_RETURNS
    plan = make_row_plan(config, tokenizer, config.data.resolved_sources(), lanes, order=order)
    plan.tell_of_long()
    wanted = config.data.num_workers
    if plan.table is not None:
        workers = workers_for_table(wanted, plan.table.dataset.data.nbytes)
    else:
        workers = workers_for_lanes(wanted, STEPS_BEFORE_A_LANE_RETURNS * batch.accumulation)
    last = None
    if plan.epochs is not None and plan.rows_per_pass is not None:
        last = plan.epochs * plan.rows_per_pass
    return Loader(MicroBatches(plan, batch, dp_rank, last), workers)


@dataclass(frozen=True)
class HeldOut:
    """The validation batches of one rank, the same whenever it is called.

    `most` is how many batches are taken, None for all.
    """

    plan: RowPlan
    batch: BatchSizes
    dp_rank: int
    most: int | None

    def __call__(self) -> Iterator[Batch]:
        return itertools.islice(_batches_of_a_pass(self.plan, self.batch, self.dp_rank), self.most)


def build_validation(
    config: Config, tokenizer: PreTrainedTokenizerBase, batch: BatchSizes, dp_rank: int
) -> HeldOut:
    """What goes over the validation batches of one rank.

    They hold every token of the set once, or the first validation.steps batches of it. There are
    equally many on every rank, in micro-batches like those of training. Documents come in the
    source's order, packed like the training data; where rows are missing at the end there are rows
    of padding, whose labels are all -100. Raises UserError when the data cannot be opened or holds
    no text.
    """
    source = config.validation.resolved_source()
    assert source is not None, "validation.dataset is set where this is called"
    plan = make_row_plan(config, tokenizer, [source], lanes=1, endless=False)
    plan.tell_of_long()
    most = None if config.validation.steps < 0 else config.validation.steps
    return HeldOut(plan, batch, dp_rank, most)


def _batches_of_a_pass(plan: RowPlan, batch: BatchSizes, dp_rank: int) -> Iterator[Batch]:
    """The micro-batches of a rank, in a pass over the documents that has an end."""
    first = dp_rank * batch.micro_batch
    for rows in rows_from_the_start(plan, batch.global_batch // batch.accumulation):
        yield plan.batch(rows[first : first + batch.micro_batch])
