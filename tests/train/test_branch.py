"""Going back to a step sets the later ones aside; the same command goes on from what is new."""

import signal
from pathlib import Path

import pytest

from lacuna.config import UserError
from lacuna.train.start import goes_back
from runs import ended, rows, start, steps, stop_after, wait_until

pytestmark = pytest.mark.slow  # whole runs of the command line

INTERVAL = ("--training.steps", 2000, "--checkpoint.interval", 10)


def stop_once(text: str, world: Path, folder: Path, *flags: object) -> str:
    """Starts a run, stops it once its settings hold `text` and it has saved; returns its output."""
    settings, before = folder / "config.toml", {*steps(folder)}
    with ended(
        start("train", world / "run.toml", "--job.dump_folder", folder, *INTERVAL, *flags)
    ) as process:
        wait_until(lambda: text in settings.read_text() and {*steps(folder)} - before, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    return " ".join(output.split())


def test_the_same_command_goes_on_from_after_the_branch_and_what_was_left_is_set_aside(
    world: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stop_after(22, world, folder, *INTERVAL)
    (folder / "hf").mkdir()
    (folder / "finished.json").write_text('{"step": 22, "steps": 22, "epochs": null}')
    left, aside = steps(folder), folder / "left-at-step-10-1"
    first = {row["step"]: row["loss"] for row in rows(folder)}
    back = ("--checkpoint.load_step", 10)

    said = stop_once("load_step = 10", world, folder, *back)
    assert "resuming after step 10 " in said
    assert f"{len(left) - 1} later checkpoints, if any, are set aside in {aside}" in said
    assert {path.name for path in aside.iterdir()} == {
        *(f"step-{step}" for step in left if step > 10),
        "metrics.jsonl",
        "hf",
        "finished.json",
    }
    reached = steps(folder)[-1]
    assert f"Stopped and saved after step {reached}. The same command goes on from there." in said

    said = stop_once("load_step = 10", world, folder, *back)
    assert f"resuming after step {reached} " in said, "and not after step 10"
    assert "to go back once more, move the checkpoints after it away" in said
    reached = steps(folder)[-1]
    assert f"resuming after step {reached} " in stop_once("load_step = -1", world, folder)
    second = {row["step"]: row["loss"] for row in rows(folder)}
    assert [*second] == [*range(1, max(second) + 1)]
    assert all(first[step] == second[step] for step in first.keys() & second.keys())
    assert not (folder / "left-at-step-10-2").exists()


@pytest.mark.parametrize(
    ("asked", "before", "expected"),
    [
        (-1, None, False),
        (4, None, True),
        (4, "load_step = 4", False),
        (4, "load_step = -1", True),
        (-1, "", False),
        (4, "load_step = 6", True),
        (4, "", True),
    ],
)
def test_a_run_goes_back_unless_the_start_before_did(
    tmp_path: Path, asked: int, before: str | None, expected: bool
) -> None:
    if before is not None:
        (tmp_path / "config.toml").write_text(f"[checkpoint]\n{before}\n")
    assert goes_back(str(tmp_path), asked) == expected


def test_settings_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[checkpoint]\nload_step = ")
    with pytest.raises(UserError, match="cannot be read from .*; remove that file"):
        goes_back(str(tmp_path), 4)
