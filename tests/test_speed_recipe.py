"""The measurement of the recipe for speed: times are those of steps, and what is made is kept."""

import importlib
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest

from lacuna import recipes
from lacuna.commands import bench
from runs import environment

sys.path.insert(0, str(bench.DRIVERS))
speed_recipe = importlib.import_module("speed_recipe")

RECIPES = Path(recipes.__path__[0])


def row(step: int, speed: float) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "tokens": 100 * step, "tokens_per_second": speed}


def validation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "val_loss": loss}


def record(recipe: str, speed: float, losses: list[float]) -> dict[str, Any]:
    """A run whose first step takes ten times as long as the others."""
    rows: list[dict[str, Any]] = [row(1, speed / 10)]
    for step, loss in enumerate(losses, 2):
        rows += [row(step, speed), validation(step, loss)]
    return {"recipe": recipe, "device": "GPU", **speed_recipe.curve(rows)}


def shape_of(config: str) -> dict[str, Any]:
    """What a recipe's model is, but for its dropout."""
    made = json.loads((RECIPES / config).read_text())
    return {name: value for name, value in made.items() if not name.endswith("_pdrop")}


def test_the_recipes_train_the_same_model_on_the_same_data() -> None:
    first, second = (
        tomllib.loads((RECIPES / f"speed_{name}.toml").read_text()) for name in ("adamw", "muon")
    )
    for settings in (first, second):
        for section in ("job", "optimizer", "lr_scheduler"):
            settings.pop(section)
        settings["training"].pop("steps")
        settings["validation"].pop("freq")
        settings["checkpoint"].pop("interval")
        settings["model"]["config"] = shape_of(settings["model"]["config"])
    assert first == second


def test_time_is_that_of_steps_and_the_first_one_compiles() -> None:
    made = record("adamw", 50.0, [3.0, 2.0])
    assert [one["seconds"] for one in made["validations"]] == [4.0, 6.0]
    assert made["seconds"] == 6.0
    with pytest.raises(SystemExit, match="log_freq must divide validation.freq"):
        speed_recipe.curve([row(1, 50.0), row(2, 50.0), validation(3, 2.0)])


def test_the_time_until_the_lowest_loss_is_compared(tmp_path: Path) -> None:
    records = {
        "adamw": {0: record("adamw", 100.0, [5.0, 3.0, 3.5]), 1: record("adamw", 100.0, [5.0])},
        "muon": {0: record("muon", 200.0, [4.0, 2.9, 2.8])},
    }
    (pair,) = speed_recipe.compared(records)
    assert pair["val_loss"] == 3.0
    assert pair["adamw"] == {"step": 3, "seconds": 3.0}
    assert pair["muon"] == {"step": 3, "seconds": 1.5, "val_loss": 2.9}
    assert pair["ratio"] == 0.5
    speed_recipe.write_results(tmp_path, records, [pair])
    table = (tmp_path / "speed.md").read_text().splitlines()
    assert table[2] == "| 0 | 3.0000 | 3 | 3.0 | 3 | 1.5 | 0.500 × | 2.8000 |"
    assert json.loads((tmp_path / "speed.json").read_text())["ratio"]["median"] == 0.5
    curves = minidom.parse(str(tmp_path / "speed.svg")).getElementsByTagName("polyline")
    assert len(curves) == 6 + 3 + 1  # lines of the grid, runs, and what was to be reached


def test_a_loss_that_is_never_reached_has_no_time(tmp_path: Path) -> None:
    records = {
        "adamw": {0: record("adamw", 100.0, [5.0, 3.0])},
        "muon": {0: record("muon", 200.0, [4.0, 3.1])},
    }
    (pair,) = speed_recipe.compared(records)
    assert pair["muon"] is pair["ratio"] is None
    speed_recipe.write_results(tmp_path, records, [pair])
    assert "| never | – | – | 3.1000 |" in (tmp_path / "speed.md").read_text()
    assert json.loads((tmp_path / "speed.json").read_text())["ratio"] is None


def test_a_run_that_came_to_its_end_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def run_until(words: list[str], ends: float, log: Path) -> int | None:
        made.append(words)
        run = Path(words[words.index("--job.dump_folder") + 1])
        run.mkdir()
        rows = [row(1, 10.0), row(2, 100.0), validation(2, 3.0)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        return None if "stopped" in words else 0

    monkeypatch.setattr(speed_recipe, "run_until", run_until)
    later = time.monotonic() + 60
    assert "was stopped" in speed_recipe.make_run(tmp_path, "adamw", 0, ["stopped"], later)
    assert not (tmp_path / "adamw-0.json").exists()
    for settings in ([], [], ["--optimizer.lr", "1e-2"]):
        assert speed_recipe.make_run(tmp_path, "adamw", 0, settings, later) is None
    assert len(made) == 3  # the second of the same settings was there
    assert "was not begun in time" in speed_recipe.make_run(tmp_path, "muon", 0, [], 0.0)
    assert len(made) == 3


@pytest.mark.slow
def test_the_recipes_are_compared_by_one_command(tmp_path: Path) -> None:
    command = [sys.executable, bench.DRIVERS / "speed_recipe.py", "--tiny", "--output", tmp_path]
    ended = subprocess.run(
        [*map(str, command), "--seeds", "0", "1"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    made = json.loads((tmp_path / "speed.json").read_text())
    assert [pair["seed"] for pair in made["pairs"]] == [0, 1]
    assert len(made["runs"]) == 4
    assert (tmp_path / "speed.md").read_text() in ended.stdout
