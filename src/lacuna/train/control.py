"""Signals, the run folder's lock, and news from the device that nobody waits for."""

import fcntl
import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor

from lacuna.config import UserError

LOCK_PATIENCE_SECONDS = 10.0


class StopRequest:
    """Set by Ctrl-C or SIGTERM: the loop saves and stops after the step. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within it, SIGINT and SIGTERM are requests to save and stop."""
    request = StopRequest()
    previous = {number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Holds the lock of a run folder; the system frees it when the process dies, however it dies.

    Raises `UserError` when another run has it. Waits some seconds first, for workers of a killed run to be gone.
    """
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "w") as file:
        deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"job.dump_folder: another run is writing to {folder!r}: stop it, or choose another folder."
                    ) from error
                time.sleep(0.2)
        yield


@contextmanager
def no_random_collection() -> Iterator[None]:
    """Within it, Python collects garbage only where the loop asks: ranks that pause at random wait for each other."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Readback:
    """Brings small device tensors to the host one step late, so that the host never waits for the device.

    On a CPU there is nothing to wait for, and values come back at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def exchange(self, values: Tensor) -> list[list[float]]:
        """Sends `values` off and returns what has arrived: the previous step's (GPU), or these (CPU)."""
        if self.device.type == "cpu":
            return [values.tolist()]
        arrived = self.flush()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (host, event)
        return arrived

    def flush(self) -> list[list[float]]:
        """Waits for what was sent off and returns it."""
        if self._pending is None:
            return []
        host, event = self._pending
        event.synchronize()
        self._pending = None
        return [host.tolist()]
