"""What is forked leaves signals to its parent from its first moment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import ended, environment, wait_until

FORKS_OFTEN = """
import os, signal
from lacuna.config.orphans import end_children_with_us

def say(*_):
    os.write(1, b"%d\\n" % os.getpid())

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, say)
end_children_with_us()
say()
for _ in range(200):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
os._exit(0)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_a_child_that_has_just_begun_answers_no_signal(number: int, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with (
        open(said, "w") as output,
        ended(
            subprocess.Popen(
                [sys.executable, "-c", FORKS_OFTEN],
                text=True,
                stdout=output,
                start_new_session=True,
                env=environment(),
            )
        ) as process,
    ):
        wait_until(lambda: said.read_text() != "", process)
        signals = 0
        while process.poll() is None:
            os.killpg(process.pid, number)  # to all, as a terminal does
            signals += 1
            time.sleep(1e-4)
    assert (process.returncode, set(said.read_text().split())) == (0, {str(process.pid)})
    assert signals > 100
