"""Writes the checkpoints of a run, with or without training waiting, and removes old ones."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lacuna.config import logger
from lacuna.config.machine import CheckpointConfig
from lacuna.formats.checkpoint import checkpoint_path, listed_steps, remove_checkpoint
from lacuna.formats.writer import write_checkpoint
from lacuna.parallel.processes import Process, on_first


class CheckpointSaver:
    """Writes the checkpoints of one run.

    At most one is being written at a time; errors surface at the next call.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        folder: str,
        describe: Callable[[str], None],
        process: Process,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.describe = describe
        # A save may run while training goes on: what ranks exchange for the two must not mix.
        self.process = replace(process, control=process.background)
        self.last_time = time.monotonic()
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], wait: bool = False
    ) -> None:
        """Writes `tensors` and `state` as the checkpoint of `step`; all ranks must call it.

        With an async mode it returns once the tensors are copied, unless `wait`.
        """
        self.wait()
        self.last_time = time.monotonic()
        if self.settings.async_mode == "disabled" or wait:
            return self._write_now(step, tensors, state)
        # What is copied without waiting goes to page-locked memory, which torch keeps for later.
        pinned = self.settings.async_mode == "async_with_pinned_mem"
        copies = {
            name: tensor.to("cpu", non_blocking=pinned, copy=True)
            for name, tensor in tensors.items()
        }
        if pinned:
            torch.cuda.synchronize()
        self._written = self._thread.submit(self._write_now, step, copies, state)

    def wait(self) -> None:
        """Waits for the checkpoint being written, if any, and raises what went wrong with it."""
        if self._written is not None:
            self._written.result()

    def _write_now(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        started = time.monotonic()
        path = checkpoint_path(self.folder, step)
        write_checkpoint(path, tensors, state, self.describe, self.process)
        on_first(self.process, lambda: self._remove_old(step, state["loop"]))
        logger.info("saved step-%d in %.1f s", step, time.monotonic() - started)

    def _remove_old(self, newest: int, loop: dict[str, Any]) -> None:
        """Removes all but the latest, the best, and step-0, which somebody made on purpose."""
        # If the last step was skipped, no step may be possible from its weights: then earlier
        # checkpoints must stay.
        if loop.get("skipped_in_a_row") or self.settings.keep_latest_k == 0:
            return
        kept = {0}
        if self.settings.keep_best:
            kept.add(loop["counters"]["best_step"])
        steps = [step for step in listed_steps(self.folder) if step <= newest and step not in kept]
        for step in steps[: -self.settings.keep_latest_k]:
            remove_checkpoint(checkpoint_path(self.folder, step))
