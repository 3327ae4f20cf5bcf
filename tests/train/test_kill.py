"""A run that is killed, however often, goes on to the same end and leaves no process behind."""

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from runs import (
    Process,
    curve,
    ended,
    processes_in,
    rows,
    start,
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
Moment = tuple[str, int | None]
"""A kind of moment, and who is killed: a worker, or with None the process that was started."""
# By number of ranks and mode, when a run is killed; nothing can follow an export.
MOMENTS: dict[int, dict[str, tuple[Moment, ...]]] = {
    1: {
        "disabled": (("writing", None), ("step", None), ("exporting", None)),
        "async": (("writing", None), ("exporting", None)),
    },
    2: {
        "disabled": (("writing", None), ("exporting", 0)),
        "async": (
            ("start-up", None),
            ("writing", 1),
            ("deleting", 0),
            ("any time", None),
            ("step", 0),
            ("deleting", None),
            ("exporting", 1),
        ),
    },
}
SOME: tuple[Moment, ...] = (("any time", 1), ("writing", 0), ("exporting", None))
REWARDED = ("generating", "judging", "updating")
STEPS = {1: 28, 2: 80}
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
    while processes_in(place(folder)):
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
    elif moment in REWARDED:
        wait_until(saved, process)
        wait_for_rewarded(moment, process, folder)
        time.sleep(generator.uniform(0, 0.01))
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


def wait_for_rewarded(moment: str, process: Process, folder: Path) -> None:
    """Returns as a run by rewards begins to generate, to judge what it generated, or to learn.

    It judges while there is a file of that name, and learns twice from what it generated.
    """
    judging = place(folder) / "judging"
    last = max((row["step"] for row in rows(folder)), default=0)

    def next_one_is_generated() -> bool:
        step = max((row["step"] for row in rows(folder)), default=0)
        return step > last and step % 2 == 0

    if moment == "generating":
        wait_until(next_one_is_generated, process, pause=OFTEN)
    else:
        wait_until(judging.exists, process, pause=OFTEN)
    if moment == "updating":
        wait_until(lambda: not judging.exists(), process, pause=OFTEN)


def start_run(world: Path, folder: Path, *flags: object) -> Process:
    """Starts a run in a new process, as a user does.

    Its output goes to a file: a pipe that nobody reads would fill and stop it.
    """
    with open(log(folder), "w") as file:
        return start_anew(*words(world, folder), *flags, stdout=file, cwd=place(folder))


def words(world: Path, folder: Path) -> tuple[object, ...]:
    return "train", world / "run.toml", "--job.dump_folder", folder


def place(folder: Path) -> Path:
    """An empty folder where the processes of the run in `folder`, and no others, are at home."""
    found = folder.with_suffix(".place")
    found.mkdir(parents=True, exist_ok=True)
    return found


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
        output = process.communicate(timeout=180)[0] or log(folder).read_text()
        assert process.returncode == 1, output
        assert f"rank {rank} was killed by signal SIGKILL; all ranks are stopped" in output
    assert nobody_left(folder), "orphans"


def kill_until_done(
    world: Path,
    folder: Path,
    ranks: int,
    mode: str,
    flags: tuple[object, ...],
    moments: Sequence[Moment],
) -> None:
    """Starts a run again and again, kills it at these moments, then lets it end.

    Only what is killed while it starts is started as a user does it. All else is forked, which
    spares the time of imports.
    """
    generator = random.Random(f"{ranks} {mode}")
    flags = (*flags, "--cpus", ranks, "--checkpoint.async_mode", mode)
    for moment, victim in moments:
        own = (*flags, "--checkpoint.interval", generator.choice((1, 2)))
        if moment == "start-up":
            process = start_run(world, folder, *own)
        else:
            process = start(*words(world, folder), *own, cwd=place(folder))
        with ended(process):
            wait_for_moment(moment, process, folder, generator)
            kill(process, folder, victim)
    train(world, folder, *flags, "--checkpoint.interval", 1, cwd=place(folder))


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


@pytest.fixture(scope="module", params=MOMENTS, ids=["one rank", "two ranks"])
def runs(
    request: pytest.FixtureRequest, world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    ranks = request.param
    folder = tmp_path_factory.mktemp("kill")
    flags = settings(world, folder, STEPS[ranks])
    straight, killed = folder / "straight", {mode: folder / mode for mode in MODES}
    together(
        lambda: train(world, straight, *flags, "--cpus", ranks),
        *(
            lambda mode=mode: kill_until_done(
                world, killed[mode], ranks, mode, flags, MOMENTS[ranks][mode]
            )
            for mode in MODES
        ),
    )
    return Runs(straight, killed)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_at_random_ends_as_the_straight_run_bit_for_bit(runs: Runs, mode: str) -> None:
    assert_same_end(runs.killed[mode], runs.straight)


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
