"""The driver of the learning experiment: its task, its pieces, and what it reports."""

import importlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lacuna.commands import bench
from lacuna.config.parse import load_config
from runs import environment, wait_until

sys.path.insert(0, str(bench.DRIVERS))
learning = importlib.import_module("learning")
report = importlib.import_module("learning_report")
task = importlib.import_module("learning_task")


def test_sums_are_different_not_held_out_from_themselves_and_careless_only_before(
    tmp_path: Path,
) -> None:
    task.write_task(tmp_path, task.TINY)
    found = {}
    right = []
    for name in ("held_out", "prompts", "sft"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        found[name] = {row["prompt"] for row in rows}
        assert len(found[name]) == len(rows) == getattr(task.TINY, name)
        for row in rows:
            result = str(eval(row["prompt"].rstrip("=")))
            if "answer" in row:
                assert row["answer"] == result
            else:
                assert row["completion"].count(",") + 1 == count_signs(row["prompt"])
                right.append(re.findall(task.RESULT, row["completion"]) == [result])
    assert 0.5 < statistics.mean(right) < 0.75
    assert not found["held_out"] & (found["prompts"] | found["sft"])
    assert [max(map(count_signs, texts)) for texts in found.values()] == [5, 5, 5]


def count_signs(text: str) -> int:
    return text.count("+") + text.count("-")


def test_a_careless_answer_goes_on_from_what_it_says() -> None:
    numbers = random.Random(0)
    assert task.worked([12, 34, -5], numbers, 0.0) == "46,41"
    first, second = map(int, task.worked([12, 34, -5], numbers, 1.0).split(","))
    assert abs(first - 46) in (1, 10) and abs(second - (first - 5)) in (1, 10)
    long = task.worked([12, 34, -50, 3], numbers, 0.0, is_written_out=True)
    assert long == "12+34=46,46-50=-4,-4+3=-1" and re.findall(task.RESULT, long) == ["-1"]


def test_the_tokenizer_has_a_token_for_each_sign_and_the_task_fits(tmp_path: Path) -> None:
    task.write_model(tmp_path, task.TINY)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer("12+34-5=").input_ids) == 8
    assert len(tokenizer("99+99+99+99=").input_ids) == 12
    longest = task.worked([99] * 6, random.Random(0), 0.0) + task.END
    assert len(tokenizer(longest).input_ids) <= task.LARGE.max_tokens
    most = task.LONG.levels[-1]
    longest = task.worked([*most], random.Random(0), 0.0, is_written_out=True) + task.END
    asked = "+".join(map(str, most)) + "="
    assert len(tokenizer(longest).input_ids) <= task.LONG.max_tokens
    assert len(tokenizer(asked + longest).input_ids) <= task.LONG.sft_row


@pytest.mark.parametrize(
    ("asked", "own", "of_trl"),
    [(["--tiny"], 10, 1), ([], 10, 3), (["--long"], 10, 3), (["--speed"], 1, 3)],
)
def test_every_run_is_a_configuration(
    asked: list[str], own: int, of_trl: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["learning.py", "--output", str(tmp_path), *asked])
    given = learning.arguments()
    sizes = learning.sizes_of(given)
    task.write_model(tmp_path / "model", sizes)
    task.write_model(tmp_path / "sft" / "hf", sizes)
    task.write_task(tmp_path / "task", task.TINY)
    runs = learning.wanted(given, sizes)
    assert sum(one.is_trl for one in runs) == of_trl
    assert sum(not one.is_trl for one in runs) == own
    for one in runs:
        file = tmp_path / f"{one.name}.toml"
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in one.settings.items()]
        file.write_text("".join(lines))
        assert load_config(str(file), []).training.steps == one.settings["training.steps"]


def log(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_report_counts_samples_updates_and_seconds(tmp_path: Path) -> None:
    def own(seed: int, last: float) -> None:
        rows: list[dict[str, Any]] = [{"step": 0, "val_pass_at_1": 0.2}]
        for step in range(1, 11):
            speed = {"tokens": step * 100, "tokens_per_second": 50.0, "memory_gib": 2.0}
            rows.append({"step": step, "reward": step / 10, "flat_groups": 0.5} | speed)
        log(tmp_path / f"grpo-{seed}", [*rows, {"step": 10, "val_pass_at_1": last}])

    own(0, 0.6)
    own(1, 0.8)
    theirs: list[dict[str, Any]] = [{"step": 0, "val_pass_at_1": 0.2}]
    theirs += [{"step": step, "seconds": 4.0, "memory_gib": 4.0} for step in range(1, 11)]
    log(tmp_path / "trl-0", [*theirs, {"step": 10, "reward": 0.5, "flat_groups": 0.1}])
    steps = [{"step": step, "reward": 0.1, "critic_loss": 1.0} for step in range(1, 9)]
    log(tmp_path / "ppo-0", [*steps, {"step": 8, "val_pass_at_1": 0.5}])
    (tmp_path / "ppo-0" / "finished.json").write_text("{}")
    text = report.write(tmp_path, task.TINY, None)
    found = json.loads((tmp_path / "learning.json").read_text())
    assert found["target"] == pytest.approx(0.2 + 0.9 * 0.5)
    grpo = found["series"]["grpo"]
    assert grpo["updates_a_minute"] == 30 and grpo["reward"] == 1 and not grpo["are_done"]
    assert grpo["samples_to_target"] == [None, 160], "10 steps of 4 prompts, 4 completions each"
    assert found["runs"]["ppo-0"]["accuracy"] == [[32, 0.5]], "two batches, each for four steps"
    assert found["beside TRL"]["updates_a_minute"] == 2 and found["beside TRL"]["memory"] == 0.5
    assert "0.700 (0.600 to 0.800)" in text and "2.00 × the updates" in text
    picture = (tmp_path / "learning.svg").read_text()
    assert picture.count("<polygon") == 6 and picture.endswith("</svg>\n")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_are_made_in_pieces(tmp_path: Path) -> None:
    words = [sys.executable, str(bench.DRIVERS / "learning.py"), "--tiny", "--seeds", "1"]
    words += ["--output", str(tmp_path), "--only", "sft", "grpo-0", "ppo-0"]
    # Less than any of the runs takes to import what it needs: how fast a machine is plays no part.
    first = subprocess.run(
        [*words, "--limit-seconds", "1"], env=environment(), capture_output=True, text=True
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert "to do: " in first.stdout and "call it again" in first.stdout
    again = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0 and "all is done" in again.stdout, again.stdout + again.stderr
    found = json.loads((tmp_path / "learning.json").read_text())
    assert [place for place, _ in found["runs"]["grpo-0"]["accuracy"]] == [0, 32, 64]
    assert [place for place, _ in found["runs"]["ppo-0"]["accuracy"]] == [0, 32, 64]
    other = subprocess.run([*words, "--lr", "1"], env=environment(), capture_output=True, text=True)
    assert other.returncode == 1 and "give another --output" in other.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_run_of_trl_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")
    task.write_task(tmp_path / "task", task.TINY)
    task.write_model(tmp_path / "sft" / "hf", task.TINY)
    config = AutoConfig.from_pretrained(tmp_path / "sft" / "hf")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "sft" / "hf")
    monkeypatch.setattr(sys, "argv", ["", "--tiny", "--steps", "8", "--output", str(tmp_path)])
    settings = learning.reward_settings(learning.arguments(), task.TINY, seed=0)
    folder = tmp_path / "trl-0"
    folder.mkdir()
    (folder / "task.json").write_text(json.dumps({"settings": settings, "batches": False}))
    words = [sys.executable, str(bench.DRIVERS / "learning_trl.py"), str(folder)]
    paths = os.pathsep.join((str(Path(trl.__file__).parent.parent), environment()["PYTHONPATH"]))
    own = environment() | {"PYTHONPATH": paths}
    process = subprocess.Popen(words, env=own, text=True)
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"seconds"' in metrics.read_text(), process)
    process.terminate()  # as the driver does when the time is over
    assert process.wait() == 0
    before = report.rows_of(metrics)
    assert list(folder.glob("checkpoint-*")) and before[-1]["step"] < 8
    subprocess.run(words, env=own, check=True)
    assert (folder / "finished.json").exists()
    found = report.rows_of(metrics)
    assert found[: len(before)] == before
    assert [row["step"] for row in found if "seconds" in row] == [*range(1, 9)]
    assert [row["step"] for row in found if "val_pass_at_1" in row] == [0, 2, 4, 6, 8]
