"""Signals, the run folder's lock, and news from the device that nobody waits for."""

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import FrameType

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from lacuna.config import UserError

LOCK_PATIENCE_SECONDS = 10.0


def stop_on_signals() -> Sequence[int]:
    """The signals received so far: from now on SIGINT and SIGTERM only ask the loop to save and stop after the step.

    A second Ctrl-C stops at once.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return received


def lock(folder: str) -> AbstractContextManager[object]:
    """Takes the lock of a run folder, until the end of the context or of the process, however it dies.

    Raises `UserError` when another run has it. Waits some seconds first, for workers of a killed run to be gone.
    """
    os.makedirs(folder, exist_ok=True)
    try:
        return FileLock(os.path.join(folder, ".lock")).acquire(timeout=LOCK_PATIENCE_SECONDS)
    except Timeout as error:
        raise UserError(
            f"job.dump_folder: another run is writing to {folder!r}: stop it, or choose another folder."
        ) from error


class Readback:
    """Brings small device tensors to the host one step late, so that the host never waits for the device.

    On a CPU there is nothing to wait for, and values come back at once.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def exchange(self, values: Tensor) -> list[list[float]]:
        """Sends `values` off and returns what has arrived: the previous step's (GPU), or these (CPU)."""
        if not values.is_cuda:
            return [values.tolist()]
        arrived = self.flush()
        host = values.to("cpu", non_blocking=True)  # into page-locked memory
        self._pending = (host, torch.cuda.current_stream().record_event())
        return arrived

    def flush(self) -> list[list[float]]:
        """Waits for what was sent off and returns it."""
        if self._pending is None:
            return []
        (host, sent), self._pending = self._pending, None
        sent.synchronize()
        return [host.tolist()]
