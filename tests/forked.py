"""Runs `lacuna` in processes forked from one that has already imported its libraries.

That spares seconds for each process. The ranks that such a process launches are forked as well.
Each has the environment, folder and output that it would have had otherwise.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

import torch

FIRST_UNKNOWN = 3  # file descriptors from here on are the parent's business

_CONTEXT = multiprocessing.get_context("forkserver")
# A status can be read once, and starting a process reads that of any other that has ended: one
# thread at a time.
_STATUSES = threading.Lock()


class Forked:
    """A process that runs `lacuna <words>` in `folder`; it answers as those of `subprocess` do.

    Its standard error is in its place among the output, or `apart`.
    """

    stdout = None  # what is printed goes to files

    def __init__(
        self, words: Sequence[str], environment: dict[str, str], folder: Path, apart: bool
    ) -> None:
        self._printed = tempfile.TemporaryDirectory()
        self._files = [
            Path(self._printed.name, name) for name in ("output", "errors" if apart else "output")
        ]
        self._process = _CONTEXT.Process(
            target=_begin, args=(words, environment, folder, *self._files)
        )
        with _STATUSES:
            self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with _STATUSES:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("lacuna", timeout or 0.0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str | None]:
        self.wait(timeout)
        output, errors = self._files
        return output.read_text(), errors.read_text() if errors != output else None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(
    words: Sequence[str], environment: dict[str, str], folder: Path, output: Path, errors: Path
) -> None:
    with open(os.devnull) as nothing, open(output, "ab") as printed, open(errors, "ab") as told:
        for ours, standard in ((nothing, 0), (printed, 1), (told, 2)):
            os.dup2(ours.fileno(), standard)
    subprocess.Popen = _ForkingPopen
    _become_lacuna(words, environment, folder)


def _become_lacuna(words: Sequence[str], environment: dict[str, str], folder: Path | None) -> None:
    """Makes the forked process like a new one.

    What the imported modules took from the environment of their server is mended.
    """
    os.environ.clear()
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if "HF_DATASETS_CACHE" in environment:
        sys.modules["datasets"].config.HF_DATASETS_CACHE = Path(environment["HF_DATASETS_CACHE"])
    # As a new process has it. Ours came along: data workers would import all libraries again, and
    # outlive us.
    multiprocessing.set_start_method(None, force=True)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for as long as the process lives)
    sys.argv = ["lacuna", *words]
    runpy.run_module("lacuna", run_name="__main__", alter_sys=True)


class _ForkingPopen(subprocess.Popen):
    """Forks this process where ranks of lacuna are to be started; starts all else as ever."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any
    ) -> None:
        if isinstance(args, str) or list(args[:3]) != [sys.executable, "-m", "lacuna"]:
            return super()._execute_child(args, executable, preexec_fn, close_fds, *rest)
        pass_fds, cwd, env = rest[:3]
        # Of standard input, output and error: what the child has, and what stays with us.
        input_, ours_in, ours_out, output, ours_error, error = rest[6:12]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for number, standard in ((input_, 0), (output, 1), (error, 2)):
                if number != -1:
                    os.dup2(number, standard)
            _close_all_but(pass_fds)
            os.setsid()
            os._exit(_status_of(args[3:], env, cwd))
        self._child_created = True
        self._close_pipe_fds(input_, ours_in, ours_out, output, ours_error, error)


def _status_of(words: Sequence[str], environment: dict[str, str], folder: Path | None) -> int:
    try:
        _become_lacuna(words, environment, folder)
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    raise AssertionError("lacuna's last line raises SystemExit")


def _close_all_but(kept: Sequence[int]) -> None:
    trackers = (
        resource_tracker._resource_tracker._fd
    )  # which knows of the semaphores that we were forked with
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= FIRST_UNKNOWN and int(name) not in (*kept, trackers):
            with contextlib.suppress(OSError):  # the listing itself had one, closed by now
                os.close(int(name))
