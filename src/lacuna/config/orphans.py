"""Processes that end with the one that started them, however that one dies."""

import ctypes
import os
import signal
import sys
import threading
import time

POLL_SECONDS = 0.2
_DIE_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG
_LIBRARY = (
    ctypes.CDLL(None) if sys.platform == "linux" else None
)  # opened here: a child should load nothing


def end_with(parent: int) -> None:
    """From now on this process is ended, at once and without writing, when its `parent` is gone, as it may be now."""
    if _LIBRARY is None:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
        return
    _LIBRARY.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def end_children_with_us() -> None:
    """From now on whatever is forked from this process, by any library, ends with it; so do children of children.

    Nor do they answer to Ctrl-C, which a terminal sends to all: to end them is for their parent.
    """
    us = [os.getpid()]

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        parent, us[0] = us[0], os.getpid()
        end_with(parent)

    os.register_at_fork(after_in_child=begin)
