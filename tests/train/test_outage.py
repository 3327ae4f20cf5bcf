"""A run that cannot go on, since what it needs is gone, has saved what it has."""

from pathlib import Path

import pytest

from runs import rows, steps, train

GONE = """
from lacuna.config import OutageError
from lacuna.objective.language_modelling import LanguageModelling


class Gone(LanguageModelling):
    asked = 0

    def measure_held_out(self, policy, held_out):
        self.asked += 1
        if self.asked > 1:
            raise OutageError("the server is gone")
        return {}, 0.0
"""


def test_the_last_validation_loses_nothing_where_a_server_is_gone(
    world: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(GONE)
    flags = ("--job.task", "own:Gone", "--validation.dataset", world / "validation.jsonl")
    flags += ("--validation.dataset_split", "train", "--validation.freq", 100)
    flags += ("--training.steps", 5, "--checkpoint.interval", 100)
    said = train(world, tmp_path / "run", *flags, cwd=tmp_path, status=1)
    assert "the server is gone" in said
    assert "Stopped and saved after step 5" in said and steps(tmp_path / "run") == [5]


FAILS_ONCE = """
from pathlib import Path

from lacuna.config import OutageError
from lacuna.objective.language_modelling import LanguageModelling


class FailsOnce(LanguageModelling):
    def measure_held_out(self, policy, held_out):
        asked = Path("asked")
        count = int(asked.read_text()) if asked.exists() else 0
        asked.write_text(str(count + 1))
        if count == {fails}:
            raise OutageError("the judge is gone")
        return {{"val_reward": 0.0}}, 0.0
"""


@pytest.mark.parametrize(("fails", "stopped"), [(1, 2), (2, 4), (3, 5)])
def test_a_validation_that_failed_is_made_when_the_run_goes_on(
    fails: int, stopped: int, world: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(FAILS_ONCE.format(fails=fails))
    run = tmp_path / "run"
    flags = ("--job.task", "own:FailsOnce", "--validation.dataset", world / "validation.jsonl")
    flags += ("--validation.dataset_split", "train", "--validation.freq", 2)
    flags += ("--training.steps", 5)
    assert f"saved after step {stopped}" in train(world, run, *flags, cwd=tmp_path, status=1)
    train(world, run, *flags, cwd=tmp_path)
    assert [row["step"] for row in rows(run) if "val_reward" in row] == [0, 2, 4, 5]
