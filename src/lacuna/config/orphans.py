"""Ends processes with the process that started them, however that one dies."""

import ctypes
import os
import signal
import sys
import threading
import time

POLL_SECONDS = 0.2
_DIE_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG
# Opened here, because a process that has just been forked should load nothing.
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(parent: int) -> None:
    """Makes this process end, at once and without writing, when its `parent` is gone.

    If the parent is gone already, this process ends now.
    """
    if _LIBRARY is None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
        return
    _LIBRARY.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def end_children_with_us() -> None:
    """Makes every process that this one forks from now on, by any library, end with this one.

    Their own children do so too. None of them reacts to Ctrl-C, which a terminal sends to all
    processes: their parent ends them.
    """
    forking = threading.local()  # several threads may fork

    # A child that has just begun still has our handlers, which would speak and count for us.
    def hold_signals() -> None:
        forking.parent = os.getpid()
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})

    def let_signals_in() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_signals_in()
        end_with_parent(forking.parent)

    os.register_at_fork(before=hold_signals, after_in_parent=let_signals_in, after_in_child=begin)
