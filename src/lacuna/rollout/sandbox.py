"""Runs code that nobody trusts in a process that has little and may do little."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from lacuna.rollout import shut_in
from lacuna.rollout.call_filter import call_filter

_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
# The largest file, how many may be open, and how many threads the user may have in all.
_FILE_BYTES = 16 * 2**20
_OPEN_FILES = 64
_THREADS = 4096
_CHUNK = 65536
# Seconds for a process to begin, which a busy machine takes longer for than an idle one.
_BEGINNING = 30.0


@dataclass(frozen=True)
class Limits:
    """What a process may take.

    Attributes:
        seconds: of the clock, and of a core.
        memory_bytes: of addresses, shared libraries included.
        unprotected: whether it may run where this system cannot shut it in.
    """

    seconds: float
    memory_bytes: int
    unprotected: bool = False


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        output: what it wrote; little more than was allowed.
        status: its exit status, negative for a signal; None where it was stopped, because it took
            too long or wrote too much.
        missing: what it could not be kept from, in words.
    """

    output: bytes
    status: int | None
    missing: tuple[str, ...]


def run(job: dict[str, Any], given: bytes, limits: Limits, most_output: int) -> Ended:
    """Runs a `job` of `rollout/shut_in.py`, which reads `given`, in an empty folder.

    Its time is counted from when it has begun. Raises `RuntimeError` where it does not begin, or
    may not.
    """
    filed = {
        "unprotected": limits.unprotected,
        "filter": call_filter(),
        "parent": os.getpid(),
    } | job
    filed |= {"limits": _resources(limits), "devices": _DEVICES}
    filed |= {"readable": [sys.prefix, sys.base_prefix, *_LIBRARIES]}
    ready, told = os.pipe()
    with (
        TemporaryDirectory(prefix="lacuna-", ignore_cleanup_errors=True) as folder,
        TemporaryFile() as job_file,
        TemporaryFile() as input_file,
        os.fdopen(ready, "rb") as beginning,
    ):
        for file, content in ((job_file, json.dumps(filed).encode()), (input_file, given)):
            file.write(content)
            file.seek(0)
        try:
            process = _start(job_file, input_file, told, folder)
        finally:
            os.close(told)
        try:
            assert process.stdout is not None
            said, _ = _read(beginning, _CHUNK, time.monotonic() + _BEGINNING)
            if not said:
                raise RuntimeError("a process for code ends before it begins, or begins too late")
            deadline = time.monotonic() + limits.seconds
            with process.stdout as stdout:
                output, is_whole = _read(stdout, most_output, deadline)
            status = _wait(process, deadline) if is_whole else None
        finally:
            _kill(process)
    missing = tuple(json.loads(said))
    if missing and not filed["unprotected"]:
        raise RuntimeError(f"this system cannot keep code from {' and '.join(missing)}")
    return Ended(output, status, missing)


def _resources(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": max(1, round(limits.seconds)),
        "RLIMIT_FSIZE": _FILE_BYTES,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_NPROC": _THREADS,
        "RLIMIT_AS": limits.memory_bytes,
    }


def _start(job: IO[bytes], given: IO[bytes], told: int, folder: str) -> subprocess.Popen[bytes]:
    """A Python that sees nothing of this process but what it is given."""
    # As isolated as by -I, which would make hashes, and so the order of sets, random.
    flags = ("-P", "-s", "-B", "-X", "utf8")
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if "LD_LIBRARY_PATH" in os.environ:  # Python itself may need it
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    script = str(Path(shut_in.__file__).resolve())
    return subprocess.Popen(
        [sys.executable, *flags, script, str(job.fileno()), str(told)],
        cwd=folder,
        env=environment,
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(job.fileno(), told),
        start_new_session=True,
    )


def _read(file: IO[bytes], most: int, deadline: float) -> tuple[bytes, bool]:
    """What comes from a pipe, and whether it is all: in time and no more than `most` bytes."""
    found = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        while len(found) <= most and selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(file.fileno(), _CHUNK)
            if not part:
                return bytes(found), True
            found += part
    return bytes(found), False


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with its whole group."""
    with suppress(ProcessLookupError, PermissionError):  # nobody is left but who is ending
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def missing_protections(limits: Limits) -> tuple[str, ...]:
    """What code cannot be kept from on this system, in words.

    Raises `RuntimeError` where a process does not begin within the limits.
    """
    ended = run({"program": "", "unprotected": True}, b"", limits, most_output=0)
    if ended.status != 0:
        raise RuntimeError("a process for code takes too long to begin (rewards.code_seconds)")
    return ended.missing
