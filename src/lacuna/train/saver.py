"""When checkpoints are written, in the foreground or behind the training, and which ones are kept."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lacuna.config import Config
from lacuna.parallel.processes import Process, on_first
from lacuna.train.checkpoint import checkpoint_path, listed_steps, remove_checkpoint, write_checkpoint

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Writes the checkpoints of one run. At most one is being written at a time; errors surface at the next call."""

    def __init__(self, config: Config, folder: str, describe: Callable[[str], None], process: Process) -> None:
        self.settings = config.checkpoint
        self.folder = folder
        self.describe = describe
        # Saves may run behind the training, whose own talk must not mix with theirs.
        self.process = replace(process, control=process.background)
        self.last_time = time.monotonic()
        self.best_step: int | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staged: dict[str, Tensor] = {}

    def due_by_steps(self, step: int) -> bool:
        """Whether a checkpoint falls due after `step` steps."""
        settings = self.settings
        return settings.enable_checkpoint and settings.interval_type == "steps" and step % settings.interval == 0

    def due_by_time(self) -> bool:
        """Whether, by this rank's clock, a checkpoint falls due now."""
        settings = self.settings
        if not settings.enable_checkpoint or settings.interval_type != "seconds":
            return False
        return time.monotonic() - self.last_time >= settings.interval

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], wait: bool = False) -> None:
        """Writes `tensors` and `state` as the checkpoint of `step`; all ranks must call it.

        With an async mode it returns once the tensors are copied, unless `wait`.
        """
        self.wait()
        self.last_time = time.monotonic()
        if self.settings.async_mode == "disabled" or wait:
            self._write(step, tensors, state)
            return
        staged = self._stage(tensors)
        self._thread = threading.Thread(target=self._write_behind, args=(step, staged, state), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the checkpoint being written, if any, and raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors` on the CPU; page-locked ones are kept for the next time, as they are slow to get."""
        if self.settings.async_mode != "async_with_pinned_mem":
            return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        if not self._staged:
            self._staged = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            for tensor in self._staged.values():
                if isinstance(tensor, DTensor):
                    tensor._local_tensor = tensor._local_tensor.pin_memory()
        for name, tensor in tensors.items():
            _local(self._staged[name]).copy_(_local(tensor), non_blocking=True)
        torch.cuda.synchronize()
        return self._staged

    def _write_behind(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        try:
            self._write(step, tensors, state)
        except BaseException as error:  # raised in the training thread by wait()
            self._error = error

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        started = time.monotonic()
        write_checkpoint(checkpoint_path(self.folder, step), tensors, state, self.describe, self.process)
        on_first(self.process, lambda: self._remove_old(step))
        logger.info("saved step-%d in %.1f s", step, time.monotonic() - started)

    def _remove_old(self, newest: int) -> None:
        keep = self.settings.keep_latest_k
        if not keep:
            return
        # step-0 is a start that somebody made on purpose.
        steps = [step for step in listed_steps(self.folder) if step not in (0, self.best_step) and step <= newest]
        for step in steps[:-keep]:
            remove_checkpoint(checkpoint_path(self.folder, step))


def ensure_folder(config: Config) -> str:
    """The folder of the run's checkpoints, made if need be."""
    folder = os.path.join(str(config.job.dump_folder), config.checkpoint.folder)
    os.makedirs(folder, exist_ok=True)
    return folder


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
