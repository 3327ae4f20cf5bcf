"""A run that is killed, however often, goes on to the same end and leaves no process behind."""

import os
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from runs import (
    Process,
    curve,
    ended,
    processes_naming,
    rows,
    start_anew,
    steps,
    together,
    train,
    wait_until,
    weights,
    write_model,
)

pytestmark = pytest.mark.slow  # whole runs of the command line

MODES = ("disabled", "async")
MOMENTS = ("start-up", "any time", "step", "writing", "deleting", "exporting")
VICTIMS = (None, 0, 1)  # the process that was started, or a worker of it
OFTEN = 0.0002  # a checkpoint is being deleted for a millisecond


class Runs(NamedTuple):
    """An uninterrupted run, and by checkpoint.async_mode those that were killed on their way."""

    straight: Path
    killed: dict[str, Path]


def settings(world: Path, folder: Path, last: int) -> tuple[object, ...]:
    """Flags of a run with dropout, validation, a data worker, and few checkpoints kept."""
    model = folder / "model"
    write_model(model, attention_dropout=0.1)
    return (
        "--model.config",
        model,
        "--training.steps",
        last,
        "--training.batch_size",
        2,
        "--data.num_workers",
        1,
        "--checkpoint.keep_latest_k",
        2,
        "--validation.dataset",
        world / "validation.jsonl",
        "--validation.dataset_split",
        "train",
        "--validation.freq",
        7,
    )


def workers(launcher: Process) -> list[int]:
    """The processes that a launcher has started so far, by rank."""
    return [
        int(number)
        for number in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ]


def nobody_left(folder: Path) -> bool:
    """Whether all processes of the run in `folder` are gone, or are so within seconds."""
    deadline = time.monotonic() + 15
    while processes_naming(str(folder)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for_moment(moment: str, process: Process, folder: Path, generator: random.Random) -> None:
    """Returns at a random instant of this kind, mostly after a checkpoint of this process."""
    before = max(steps(folder), default=0)
    began = time.monotonic()

    def saved(enough: int = 1) -> bool:
        return max(steps(folder), default=0) - before >= enough

    def hidden(name: str) -> bool:
        return any((folder / "checkpoint").glob(f".{name}-*"))

    if moment in ("start-up", "any time"):
        patience = generator.uniform(0, 4) if moment == "start-up" else generator.uniform(3, 8)
        wait_until(lambda: time.monotonic() > began + patience or saved(6), process)
    elif moment == "exporting":
        wait_until(lambda: any(folder.glob("hf*")), process, timeout=600, pause=OFTEN)
    else:
        wait_until(saved, process)
        if moment == "step":
            time.sleep(generator.uniform(0, 0.1))
        else:
            wait_until(
                lambda: hidden("unfinished" if moment == "writing" else "removed"),
                process,
                pause=OFTEN,
            )


def start_run(world: Path, folder: Path, *flags: object) -> Process:
    """Starts a run whose output goes to a file: a pipe that nobody reads would fill and stop it."""
    with open(log(folder), "w") as file:
        return start_anew(
            "train", world / "run.toml", "--job.dump_folder", folder, *flags, stdout=file
        )


def log(folder: Path) -> Path:
    """What the last process of the run in `folder` printed."""
    return folder.with_suffix(".log")


def kill(process: Process, folder: Path, rank: int | None) -> None:
    """Kills a worker, or with None the process itself, and checks what becomes of the others."""
    started = workers(process)
    if rank is None or rank >= len(started):  # too early for a worker
        process.kill()
        assert process.wait() == -signal.SIGKILL
    else:
        os.kill(started[rank], signal.SIGKILL)
        status, output = process.wait(timeout=180), log(folder).read_text()
        assert status == 1, output
        assert f"rank {rank} was killed by signal SIGKILL; all ranks are stopped" in output
    assert nobody_left(folder), "orphans"


def kill_until_done(
    world: Path, folder: Path, ranks: int, mode: str, flags: tuple[object, ...], rounds: int
) -> None:
    """Starts a run again and again, kills it `rounds` times at random, then lets it end."""
    generator = random.Random(f"{ranks} {mode}")
    flags = (*flags, "--cpus", ranks, "--checkpoint.async_mode", mode)
    moments = [*generator.sample(MOMENTS[:-1] * 4, rounds - 1), MOMENTS[-1]]
    victims = [VICTIMS[number % len(VICTIMS)] if ranks > 1 else None for number in range(rounds)]
    generator.shuffle(victims)
    for moment, victim in zip(moments, victims, strict=True):
        with ended(
            start_run(world, folder, *flags, "--checkpoint.interval", generator.choice((1, 2)))
        ) as process:
            wait_for_moment(moment, process, folder, generator)
            kill(process, folder, victim)
    train(world, folder, *flags, "--checkpoint.interval", 1)


def assert_same_end(killed: Path, straight: Path) -> None:
    keys = ("loss", "grad_norm", "lr", "tokens", "skipped_steps")
    assert curve(killed, *keys) == curve(straight, *keys)
    validations = [
        [row for row in rows(folder) if "val_loss" in row] for folder in (killed, straight)
    ]
    assert validations[0] == validations[1] != []
    assert weights(killed) == weights(straight)
    last = curve(straight)[-1][0]
    assert steps(killed)[-1] == last
    assert len(steps(killed)) == 2
    leftovers = [*(killed / "checkpoint").glob(".*"), *killed.glob("*unfinished*")]
    assert leftovers == []


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(
    request: pytest.FixtureRequest, world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    ranks = request.param
    folder = tmp_path_factory.mktemp("kill")
    flags = settings(world, folder, 28)
    straight, killed = folder / "straight", {mode: folder / mode for mode in MODES}
    together(
        lambda: train(world, straight, *flags, "--cpus", ranks),
        *(
            lambda mode=mode: kill_until_done(world, killed[mode], ranks, mode, flags, 4 - ranks)
            for mode in MODES
        ),
    )
    return Runs(straight, killed)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_at_random_ends_as_the_straight_run_bit_for_bit(runs: Runs, mode: str) -> None:
    assert_same_end(runs.killed[mode], runs.straight)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_killed_ten_times_ends_as_the_straight_run_bit_for_bit(
    world: Path, tmp_path: Path
) -> None:
    flags = settings(world, tmp_path, 130)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    together(
        lambda: train(world, straight, *flags, "--cpus", 2),
        lambda: kill_until_done(world, killed, 2, "async", flags, 10),
    )
    assert_same_end(killed, straight)


def test_a_killed_launcher_leaves_no_orphan_that_writes(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ended(
        start_run(world, folder, "--cpus", 2, *settings(world, tmp_path, 100_000))
    ) as process:
        wait_until(lambda: len(rows(folder)) > 3, process)
        process.kill()
        process.wait()
        time.sleep(0.2)
        written = (folder / "metrics.jsonl").read_bytes()
        time.sleep(1)
        assert (folder / "metrics.jsonl").read_bytes() == written
        assert nobody_left(folder)


def test_a_killed_worker_stops_the_others_and_is_named(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ended(
        start_run(world, folder, "--cpus", 2, *settings(world, tmp_path, 100_000))
    ) as process:
        wait_until(lambda: len(rows(folder)) > 3, process)
        kill(process, folder, 1)


def test_a_killed_data_worker_is_one_message(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ended(start_run(world, folder, *settings(world, tmp_path, 100_000))) as process:
        wait_until(lambda: len(rows(folder)) > 3, process)
        for worker in workers(process):
            os.kill(worker, signal.SIGKILL)
        status, output = process.wait(timeout=180), log(folder).read_text()
    assert status == 1, output
    assert output.count("lacuna: DataLoader worker") == 1
    assert "Where memory ran out, fewer workers (data.num_workers)" in output
    assert "Traceback" not in output
