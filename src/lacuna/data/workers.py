"""The processes that prepare batches: how many there are, and how they start and end."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec.asyn
import multiprocess  # of datasets, in the place of Python's own

from lacuna.config import RunError
from lacuna.config.cores import usable_cores

_MOST_WORKERS = 8
# A worker reads tables of more bytes than this: the trainer would wait for the disk.
_READ_IN_PROCESS = 2**30


def workers_for_table(wanted: int | None, table_bytes: int) -> int:
    """How many workers read a table of this size: as many as wanted, else one if it is large."""
    if wanted is not None:
        return wanted
    return int(table_bytes > _READ_IN_PROCESS)


def workers_for_lanes(wanted: int | None, period: int) -> int:
    """How many workers tokenise: as many as wanted, or as fit the machine.

    Each worker has lanes of its own, which come back every `period` micro-batches. So the number
    must divide `period`: it is the largest divisor that is at most the number wanted.
    """
    if wanted is None:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        spare = usable_cores() // ranks_here - 1
        wanted = min(_MOST_WORKERS, max(1, spare))
    return max((count for count in range(1, wanted + 1) if period % count == 0), default=0)


def start_method(workers: int) -> str | None:
    """How so many workers are started; None where that is Python's choice, or there are none.

    On Linux they are forked. Python 3.14 would have a server start them, which outlives a run that
    is killed, and its workers with it.
    """
    return "fork" if workers and sys.platform == "linux" else None


@contextmanager
def pools_forked() -> Iterator[None]:
    """Within it the workers that `datasets` starts are started as ours are."""
    before = multiprocess.get_start_method(allow_none=True)
    multiprocess.set_start_method(start_method(1), force=True)
    try:
        yield
    finally:
        multiprocess.set_start_method(before, force=True)


def start_worker(_number: int) -> None:
    """Prepares a worker process that has just begun.

    It ignores signals, because the trainer stops its workers itself. If the trainer dies, torch has
    them end within seconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The parent may have held this lock at the fork.
    fsspec.asyn.reset_lock()
    # Where workers are not forked, Python's shutdown sometimes aborts in threads of C++.
    atexit.register(os._exit, 0)


def stop_workers(batches: Any) -> None:
    """Ends the workers of torch's iterator: in good order, or by force if they are too busy."""
    workers = getattr(batches, "_workers", ())
    if workers:
        batches._shutdown_workers()
    for worker in workers:
        worker.kill()
        worker.join()


def is_worker_end(error: BaseException) -> bool:
    """Whether an error tells that a worker has ended.

    Torch raises it out of a signal handler, wherever the process happens to be.
    """
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


@contextmanager
def worker_ends_explained() -> Iterator[None]:
    """A context in which the end of a worker becomes one message to the user."""
    try:
        yield
    except RuntimeError as error:
        if not is_worker_end(error):
            raise
        said = str(error).partition("\n")[0].rstrip(". ")
        raise RunError(
            f"{said}. Where memory ran out, fewer workers (data.num_workers) or less in advance "
            "(data.prefetch_factor) take less; the same command goes on from the last checkpoint."
        ) from error
