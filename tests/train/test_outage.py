"""A run that cannot go on, since what it needs is gone, has saved what it has."""

from pathlib import Path

from runs import steps, train

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
