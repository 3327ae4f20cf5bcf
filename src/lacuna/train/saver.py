"""Which checkpoint a run starts from; when others are written, at once or behind the training; which are kept."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lacuna.config import Config, UserError
from lacuna.parallel.processes import Process, on_first
from lacuna.train import checkpoint

logger = logging.getLogger(__name__)


def find_start(config: Config, folder: str, process: Process) -> tuple[str | None, dict[str, Any] | None]:
    """The checkpoint that the weights come from, if any, and its state where everything else does too.

    That is the newest complete checkpoint in `folder` or the one asked for; `step-0` and
    `checkpoint.initial_load_path` give weights only. Raises `UserError` for one that cannot be used.
    """
    settings, path = config.checkpoint, None
    if settings.enable_checkpoint and settings.load_step >= 0:
        asked = checkpoint.checkpoint_path(folder, settings.load_step)
        path = checkpoint.require_complete(asked, "checkpoint.load_step", process)
    elif settings.enable_checkpoint:
        path = checkpoint.newest_complete(folder, process)
    state = {"step": 0} if path is None else checkpoint.read_state(path)
    if path is None and settings.initial_load_path:
        path = checkpoint.require_complete(settings.initial_load_path, "checkpoint.initial_load_path", process)
    if state["step"] == 0:
        if path is not None:
            logger.info("starting from the weights in %s", path)
        return path, None
    if "data" not in state:
        raise UserError(
            f"checkpoint.load_step: {path} holds weights only (checkpoint.model_weights_only), so the run cannot go "
            f"on from it: start a new run with checkpoint.initial_load_path = {path!r}."
        )
    logger.info("resuming after step %d from %s", state["step"], path)
    return path, state


class CheckpointSaver:
    """Writes the checkpoints of one run. At most one is being written at a time; errors surface at the next call."""

    def __init__(self, config: Config, folder: str, describe: Callable[[str], None], process: Process) -> None:
        self.settings = config.checkpoint
        self.folder = folder
        self.describe = describe
        # Saves may run behind the training, whose own talk must not mix with theirs.
        self.process = replace(process, control=process.background)
        self.last_time = time.monotonic()
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def due_by_steps(self, step: int) -> bool:
        """Whether a checkpoint falls due after `step` steps."""
        return self.settings.interval_type == "steps" and step % self.settings.interval == 0

    def due_by_time(self) -> bool:
        """Whether, by this rank's clock, a checkpoint falls due now."""
        settings = self.settings
        return settings.interval_type == "seconds" and time.monotonic() - self.last_time >= settings.interval

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], wait: bool = False) -> None:
        """Writes `tensors` and `state` as the checkpoint of `step`; all ranks must call it.

        With an async mode it returns once the tensors are copied, unless `wait`.
        """
        self.wait()
        self.last_time = time.monotonic()
        if self.settings.async_mode == "disabled" or wait:
            self._write(step, tensors, state)
            return
        # Copied without waiting, tensors go to page-locked memory, which torch keeps for the next time.
        pinned = self.settings.async_mode == "async_with_pinned_mem"
        copies = {name: tensor.to("cpu", non_blocking=pinned, copy=True) for name, tensor in tensors.items()}
        if pinned:
            torch.cuda.synchronize()
        self._written = self._thread.submit(self._write, step, copies, state)

    def wait(self) -> None:
        """Waits for the checkpoint being written, if any, and raises what went wrong with it."""
        if self._written is not None:
            self._written.result()

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        started = time.monotonic()
        path = checkpoint.checkpoint_path(self.folder, step)
        checkpoint.write_checkpoint(path, tensors, state, self.describe, self.process)
        on_first(self.process, lambda: self._remove_old(step, state))
        logger.info("saved step-%d in %.1f s", step, time.monotonic() - started)

    def _remove_old(self, newest: int, state: dict[str, Any]) -> None:
        best = state["counters"]["best_step"] if self.settings.keep_best else None
        # step-0 is a start that somebody made on purpose.
        steps = [step for step in checkpoint.listed_steps(self.folder) if step not in (0, best) and step <= newest]
        for step in steps[: -self.settings.keep_latest_k or 0]:
            checkpoint.remove_checkpoint(checkpoint.checkpoint_path(self.folder, step))
