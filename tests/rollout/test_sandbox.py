"""Code that nobody trusts has its folder and its limits, and reaches nothing else."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lacuna.rollout import sandbox
from lacuna.rollout.call_filter import call_filter
from lacuna.rollout.sandbox import Ended, Limits, missing_protections, run
from lacuna.rollout.shut_in import plain

LIMITS = Limits(seconds=10, memory_bytes=2**30)
SHORT = Limits(seconds=1, memory_bytes=2**30)

pytestmark = pytest.mark.skipif(
    missing_protections(LIMITS) != (), reason="this system cannot shut in a process"
)


def ended(program: str, given: str = "", limits: Limits = LIMITS, most: int = 2**16) -> Ended:
    return run({"program": program}, given.encode(), limits, most)


def said(program: str, given: str = "") -> str:
    """What a program writes; where it fails, the error."""
    lines = "\n".join(f"    {line}" for line in program.split("\n"))
    caught = f"try:\n{lines}\nexcept BaseException as error:\n    print(type(error).__name__)"
    return ended(caught, given).output.decode().strip()


def test_a_program_reads_and_writes_as_any_other() -> None:
    assert ended("print(int(input()) + 1)", "41\n") == Ended(b"42\n", 0, ())
    assert ended("import sys; sys.exit(3)").status == 3
    assert ended("1 / 0").status == 1
    assert ended("import os; os.abort()").status == -6


def test_what_honest_programs_use_is_there() -> None:
    assert said("import threading\nthreading.Thread(target=print, args=(5,)).start()") == "5"
    assert said("import numpy\nprint(int(numpy.ones(3) @ numpy.ones(3)))") == "3"
    coroutine = "import asyncio\nasync def one(): await asyncio.sleep(0); return 1\n"
    assert said(f"{coroutine}print(asyncio.run(one()))") == "1"
    assert said("import sqlite3, decimal, heapq, random, datetime, zoneinfo\nprint(1)") == "1"
    assert said("import sys\nclass A: pass\nprint(A.__module__, sys.argv, __name__)") == (
        "__main__ [''] __main__"
    )
    orders = {said("print(*{str(n) for n in range(20)})") for _ in range(2)}
    assert len(orders) == 1, "the order of sets is the same each time"


def test_its_folder_is_empty_its_own_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = "import os\nprint(os.listdir())\nopen('a', 'w').write('b')\nprint(open('a').read())"
    assert said(text) == "[]\nb"
    assert said("import os\nos.mkdir('deep')") == "PermissionError"
    assert said("open('a', 'wb').write(bytes(2**25))") == "OSError"
    assert [*tmp_path.iterdir()] == []


def test_it_reads_and_changes_no_other_files(tmp_path: Path) -> None:
    own = tmp_path / "tests.jsonl"
    own.write_text("secret")
    for line in (
        f"open({str(own)!r}).read()",
        f"open({str(own)!r}, 'a')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.truncate({str(own)!r}, 0)",
        f"os.chmod({str(own)!r}, 0)",
        f"os.utime({str(own)!r})",
        f"os.remove({str(own)!r})",
        f"os.rename({str(own)!r}, 'here')",
        f"os.link({str(own)!r}, 'here')",
        f"os.symlink({str(own)!r}, 'here')",
        f"os.listdir({str(tmp_path)!r})",
        "open('/etc/passwd').read()",
        "open('/proc/self/mem').read()",
        "open('/dev/shm/new', 'w')",
        "open('/dev/tty', 'w')",
    ):
        assert said(f"import os\n{line}") in ("PermissionError", "OSError"), line
    assert own.read_text() == "secret" and [*tmp_path.iterdir()] == [own]


def test_it_has_no_secrets_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in said("import os\nprint(os.environ)")
    for name in ("environ", "cmdline", "mem", "maps"):
        text = f"import os\nprint(open(f'/proc/{{os.getppid()}}/{name}', 'rb').read())"
        assert said(text) == "PermissionError"
    files = [int(one) for one in os.listdir("/proc/self/fd")]
    closed = said(
        "import os\n"
        f"for number in range(3, {max(files) + 10}):\n"
        "    try:\n        os.fstat(number); print(number)\n    except OSError: pass"
    )
    assert closed == "", "no file of the trainer is open in it"


def test_it_reaches_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
        assert said(text) == "PermissionError"
        assert said("import socket\nsocket.socket(socket.AF_UNIX)") == "PermissionError"


def test_it_starts_no_processes_and_ends_no_others() -> None:
    assert said("import os\nwhile True: os.fork()") == "PermissionError"
    assert said("import subprocess\nsubprocess.run(['true'])") == "PermissionError"
    assert said("import os\nos.execv('/bin/true', ['true'])") == "PermissionError"
    assert said("import os\nos.posix_spawn('/bin/true', ['true'], {})") == "PermissionError"
    assert said("import os\nos.kill(os.getppid(), 9)") == "PermissionError"
    assert said("import os\nos.killpg(os.getpgid(os.getppid()), 9)") == "PermissionError"
    calls = {"x86_64": 234, "aarch64": 131}
    call = calls[os.uname().machine]
    text = f"print(ctypes.CDLL(None).syscall({call}, os.getppid(), os.getppid(), 9))"
    assert said(f"import ctypes, os\n{text}") == "-1"
    owner = "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())"
    assert said(f"import fcntl, os\n{owner}") == "PermissionError"
    assert said("import os\nos.setpriority(0, os.getppid(), 19)") == "PermissionError"
    limit = "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))"
    assert said(f"import os, resource\n{limit}") == "PermissionError"


def test_its_limits_cannot_be_lifted() -> None:
    assert said("bytearray(2**31)") == "MemoryError"
    assert said("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))") == "ValueError"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "import os, time\nos.close(1)\ntime.sleep(60)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    ],
)
def test_it_ends_in_time(program: str) -> None:
    begun = time.monotonic()
    assert ended(program, limits=SHORT).status in (None, -9, -24)
    assert time.monotonic() - begun < 5


def test_who_writes_too_much_is_stopped() -> None:
    begun = time.monotonic()
    found = ended("while True: print('x' * 10**6)")
    assert found.status is None and len(found.output) < 2**18
    assert time.monotonic() - begun < 5


def test_a_process_that_cannot_begin_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="before it begins"):
        run({"program": "print(1)", "filter": ["nonsense"]}, b"", LIMITS, 100)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="too long to begin"):
        patch.setattr(sandbox, "_wait", lambda *_: None)  # or it may end before anyone looks
        missing_protections(LIMITS)
    monkeypatch.setattr(sandbox, "_BEGINNING", 0.001)
    with pytest.raises(RuntimeError, match="begins too late"):
        run({"program": "print(1)"}, b"", LIMITS, 100)


def test_time_is_counted_from_when_a_process_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "python"
    late.write_text(f'#!/bin/sh\nsleep 3\nexec {sys.executable} "$@"\n')
    late.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(late))
    assert ended("print(1)", limits=Limits(2, 2**30)) == Ended(b"1\n", 0, ())


def test_nothing_runs_where_it_cannot_be_shut_in() -> None:
    assert call_filter("riscv64") == []
    job = {"program": "print(1)", "filter": call_filter("riscv64")}
    with pytest.raises(RuntimeError, match="network, processes and signals"):
        run(job, b"", LIMITS, 100)
    found = run(job | {"unprotected": True}, b"", LIMITS, 100)
    assert found == Ended(b"1\n", 0, ("network, processes and signals",))


def test_it_ends_with_the_trainer() -> None:
    lines = (
        "from lacuna.rollout.sandbox import Limits, run",
        "run({'program': 'import time; time.sleep(60)'}, b'', Limits(60, 2**30), 100)",
    )
    trainer = subprocess.Popen([sys.executable, "-c", "\n".join(lines)])
    children: list[str] = []
    while not children:
        time.sleep(0.05)
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
    time.sleep(0.5)  # it begins
    trainer.kill()
    trainer.wait()
    end = time.monotonic() + 5
    while time.monotonic() < end and any(is_alive(int(one)) for one in children):
        time.sleep(0.05)
    assert not any(is_alive(int(one)) for one in children)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_classes_of_the_code_are_no_plain_values() -> None:
    class Anything:
        def __eq__(self, other: object) -> bool:
            return True

    with pytest.raises(TypeError):
        plain([1, Anything()])
