"""Ctrl-C before the first step is one message, and nothing writes once its parent is gone."""

import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from runs import (
    ended,
    environment,
    processes_naming,
    start_anew,
    together,
    wait_until,
    write_documents,
)

MESSAGE = "lacuna: interrupted at once, without saving."


def held_back() -> None:
    """Holds Ctrl-C back while Python itself starts, which would answer with a traceback."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def nobody_left(folder: Path, patience: float = 5) -> bool:
    deadline = time.monotonic() + patience
    while processes_naming(str(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes_naming(str(folder))


def interrupted(folder: Path, seconds: float, *words: object) -> tuple[int, str]:
    """How `lacuna <words>` ends by SIGINT after so many seconds; its output goes to a file."""
    folder.mkdir()
    with (
        open(folder / "said", "w") as said,
        ended(start_anew(*words, stdout=said, preexec_fn=held_back)) as process,
    ):
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        assert nobody_left(folder)
    return process.returncode, (folder / "said").read_text()


@pytest.mark.parametrize("flags", [(), ("--cpus", 2)], ids=["one process", "launched"])
def test_ctrl_c_before_the_first_step_is_one_message_and_130(
    world: Path, tmp_path: Path, flags: tuple[object, ...]
) -> None:
    moments = {
        seconds: tmp_path / f"{seconds} s" for seconds in (0, 0.1, 0.5, 1, 2)
    }  # no name begins another
    long = ("--training.gradient_accumulation_steps", 20_000)
    ends = together(
        *(
            partial(
                interrupted,
                folder,
                seconds,
                "train",
                world / "run.toml",
                "--job.dump_folder",
                folder / "run",
                *long,
                *flags,
            )
            for seconds, folder in moments.items()
        )
    )
    assert ends == [(130, f"{MESSAGE}\n")] * len(moments)


def test_ctrl_c_ends_other_commands_alike(world: Path, tmp_path: Path) -> None:
    words = ("generate", tmp_path / "generate", "--prompt", "the")
    assert interrupted(tmp_path / "generate", 0, *words) == (130, f"{MESSAGE}\n")


def tokenising(world: Path, folder: Path) -> subprocess.Popen[str]:
    """A run, in a process group of its own, that tokenises in several processes for a while."""
    folder.mkdir()
    data = write_documents(folder / "long.jsonl", random.Random(0), 1000)
    data.write_text(data.read_text() * 100)
    flags = ("--job.dump_folder", folder / "run", "--data.dataset", data)
    with open(folder / "said", "w") as said:
        process = start_anew(
            "train",
            world / "run.toml",
            *flags,
            stdout=said,
            start_new_session=True,
            env=environment(HF_DATASETS_CACHE=str(folder / "cache")),
        )
    wait_until(
        lambda: len(processes_naming(str(folder))) > 3, process, timeout=120
    )  # two workers and their manager
    return process


def killed(world: Path, folder: Path, seconds: float) -> bool:
    with ended(tokenising(world, folder)) as process:
        time.sleep(seconds)
        process.kill()
        process.wait()
        return nobody_left(folder)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="tokenises in one process")
@pytest.mark.slow
def test_nothing_that_tokenises_outlives_its_parent(world: Path, tmp_path: Path) -> None:
    moments = (0, 0.3, 1)
    assert (
        together(*(partial(killed, world, tmp_path / f"{moment}", moment) for moment in moments))
        == [True] * 3
    )


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="tokenises in one process")
def test_ctrl_c_twice_ends_a_run_that_tokenises_at_once(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with ended(tokenising(world, folder)) as process:
        for _ in range(2):  # to all, as a terminal does
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert nobody_left(folder)
    assert (folder / "said").read_text().count(MESSAGE) == 1
    assert "Traceback" not in (folder / "said").read_text()
