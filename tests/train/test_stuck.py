"""A rank that is halted is named by the others, in bounded time, wherever it is."""

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from runs import Process, ended, rows, start, together, wait_until

pytestmark = pytest.mark.slow  # whole runs of the command line

SOON, LATE = 6, 120
PATIENCE = 60  # more than SOON and what a busy machine adds, less than LATE


class Case(NamedTuple):
    """Who is halted, and while what is done."""

    victim: int
    saving: bool
    ranks: int = 2


CASES = {"training": Case(0, False), "save": Case(1, True)}
MORE = {
    "training, the last of three": Case(2, False, 3),
    "save, the first of three": Case(0, True, 3),
}


def workers(launcher: Process) -> list[int]:
    """The processes of a run, by rank."""
    return [
        int(number)
        for number in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ]


def halt(process: Process, folder: Path, case: Case) -> None:
    """Stops a rank for good, in the middle of a save if that is the case."""
    wait_until(lambda: len(rows(folder)) > 3, process)
    unfinished = lambda: [path.name for path in (folder / "checkpoint").glob(".unfinished-*")]  # noqa: E731
    while True:
        if case.saving:
            wait_until(unfinished, process, pause=0.0002)
        os.kill(workers(process)[case.victim], signal.SIGSTOP)
        found = unfinished()
        time.sleep(1)
        if not case.saving or (found and found == unfinished()):
            return
        os.kill(workers(process)[case.victim], signal.SIGCONT)


def said_of(world: Path, folder: Path, case: Case) -> str:
    """What a run says after one of its ranks was halted; it must end by the shorter time limit."""
    flags = (
        "--cpus",
        case.ranks,
        "--training.steps",
        100_000,
        "--checkpoint.interval",
        1 if case.saving else 100_000,
        "--comm.train_timeout_seconds",
        LATE if case.saving else SOON,
        "--comm.save_timeout_seconds",
        SOON if case.saving else LATE,
    )
    with ended(start("train", world / "run.toml", "--job.dump_folder", folder, *flags)) as process:
        halt(process, folder, case)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, output
    return " ".join(output.split())


def check(world: Path, folder: Path, cases: dict[str, Case]) -> None:
    outputs = together(
        *(lambda name=name: said_of(world, folder / name, cases[name]) for name in cases)
    )
    for case, output in zip(cases.values(), outputs, strict=True):
        assert f"lacuna: rank {case.victim} is halted, as by SIGSTOP" in output
        # Why differs: the first to give up says that its time is over, the others that it is gone.
        assert f"lacuna: rank {case.victim} did not answer: " in output
        assert f"{'save' if case.saving else 'train'}_timeout_seconds = {SOON} " in output
        assert "Traceback" not in output


def test_a_halted_rank_is_named_in_training_and_in_a_save(world: Path, tmp_path: Path) -> None:
    check(world, tmp_path, CASES)


@pytest.mark.slow
def test_a_halted_rank_is_named_whichever_it_is(world: Path, tmp_path: Path) -> None:
    check(world, tmp_path, MORE)
