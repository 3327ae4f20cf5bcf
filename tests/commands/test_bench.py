"""`lacuna bench` measures steps of a run and leaves the run alone; a peer makes the same steps."""

import json
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lacuna.commands import bench
from lacuna.train.kernels import CLASSES, IDLE
from runs import environment, lacuna, refused, write_model
from tiny import tiny_config

WINDOW = 2


def measured(world: Path, folder: Path, *flags: object) -> dict[str, Any]:
    """What `lacuna bench` of the world's run writes to `folder`."""
    words = ("--steps", WINDOW, "--output", folder, "--job.dump_folder", folder / "run")
    output = lacuna("bench", world / "run.toml", "--job.name", "tiny", *words, *flags)
    assert f"Written to {folder / 'tiny.json'} and {folder / 'tiny.svg'}." in output
    record: dict[str, Any] = json.loads((folder / "tiny.json").read_text())
    return record


def require_whole(record: dict[str, Any]) -> None:
    """Asserts that what must add up does."""
    own = record["lacuna"]
    speeds = [window["tokens_per_second"] for window in own["windows"]]
    speed = own["tokens_per_second"]
    assert speed["median"] == statistics.median(speeds) > 0
    assert speed["spread"] == pytest.approx((max(speeds) - min(speeds)) / speed["median"])
    kernels = own["kernels"]
    assert kernels["seconds"].keys() == {*CLASSES, IDLE}
    assert sum(kernels["seconds"].values()) == pytest.approx(kernels["step_seconds"])
    for name in ("matrix products", "attention", "elementwise", "copies"):
        assert 0 < kernels["seconds"][name] <= kernels["busy_seconds"][name] * (1 + 1e-9), name
    memory = own["memory_gib"]
    assert memory["parameters"] == memory["gradients"] > 0
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=0.01)
    parts = ("parameters", "gradients", "optimizer", "activations_and_rest")
    assert sum(memory[part] for part in parts) == pytest.approx(memory["reserved"])


@pytest.mark.slow
def test_a_run_is_measured_and_left_alone(world: Path, tmp_path: Path) -> None:
    flags = ("--validation.dataset", world / "validation.jsonl", "--validation.freq", 1)
    flags += ("--checkpoint.interval", 1, "--training.epochs", 1, "--training.steps", "none")
    record = measured(world, tmp_path, *flags, "--windows", 4)
    require_whole(record)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.json", "tiny.svg"]
    own = record["lacuna"]
    assert [window["step"] for window in own["windows"]] == [6, 8, 10, 12]
    assert own["mfu"] is None
    assert own["memory_gib"]["parameters"] == record["parameters"] * 4 / 2**30
    assert record["settings"]["training"]["epochs"] == 1
    assert record["versions"]["torch"]
    assert record["device"]["type"] == "cpu"
    assert record["sequences_of_a_step"] == 4
    text = "".join(ElementTree.parse(tmp_path / "tiny.svg").getroot().itertext())
    assert "matrix" in text and "optimizer" in text


@pytest.mark.slow
def test_the_trainer_of_transformers_makes_the_same_steps(world: Path, tmp_path: Path) -> None:
    flags = ("--against", "transformers", "--training.gradient_accumulation_steps", 2)
    record = measured(world, tmp_path, *flags)
    require_whole(record)
    own, peer = record["lacuna"], record["transformers"]
    # Other weights, rows, labels or bounds of documents would differ in the second digit.
    assert peer["first_loss"] == pytest.approx(own["first_loss"], abs=1e-4)
    assert len(peer["window_seconds"]) == len(own["windows"]) == 3
    tokens = [sum(peer["task"]["tokens_of_steps"][step : step + WINDOW]) for step in (4, 6, 8)]
    speeds = [count / time for count, time in zip(tokens, peer["window_seconds"], strict=True)]
    assert peer["tokens_per_second"]["highest"] == pytest.approx(max(speeds))
    ratio = own["tokens_per_second"]["median"] / peer["tokens_per_second"]["median"]
    assert record["ratio"]["tokens_per_second"] == pytest.approx(ratio)


@pytest.mark.slow
def test_two_processes_and_their_peers_make_the_steps_of_one(world: Path, tmp_path: Path) -> None:
    alone = measured(world, tmp_path / "one")
    two = ("--cpus", 2, "--training.batch_size", 2)
    sharded = measured(world, tmp_path / "sharded", *two)
    require_whole(sharded)
    half = alone["lacuna"]["memory_gib"]["parameters"] / 2
    assert sharded["lacuna"]["memory_gib"]["parameters"] == pytest.approx(half, rel=0.01)
    assert sharded["lacuna"]["kernels"]["busy_seconds"]["communication"] > 0
    both = ("--parallelism.data_parallel_replicate_degree", 2, "--against", "transformers")
    copied = measured(world, tmp_path / "copied", *two, *both)
    first = alone["lacuna"]["first_loss"]
    assert copied["transformers"]["first_loss"] == pytest.approx(first, abs=1e-4)
    for record in (sharded, copied):
        assert record["lacuna"]["first_loss"] == pytest.approx(first, rel=1e-5)


def test_what_cannot_be_is_refused_before_anything_is_done(world: Path, tmp_path: Path) -> None:
    run = ("bench", world / "run.toml", "--output", tmp_path)
    assert "--windows must be at least 3" in refused(*run, "--windows", 2)
    assert "--steps must be at least 1" in refused(*run, "--steps", 0)
    assert "choose from" in refused(*run, "--against", "megatron")
    (tmp_path / "file").touch()
    said = refused("bench", world / "run.toml", "--output", tmp_path / "file")
    assert "bench: --output: cannot write" in said and "is a file" in said
    against = (*run, "--against", "transformers")
    for setting in (
        ("--lora.rank", 4),
        ("--activation_checkpoint.mode", "selective"),
        ("--training.enable_cpu_offload",),
        ("--parallelism.tensor_parallel_degree", 2),
        ("--job.task", "preference"),
    ):
        name = str(setting[0]).removeprefix("--")
        assert f"has nothing like {name}=" in refused(*against, *setting)
    assert "data_parallel_replicate_degree = 2" in refused(*against, "--cpus", 2)
    assert not (tmp_path / "run.json").exists()


def test_a_driver_that_is_not_there_is_named_with_the_way_to_it(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "DRIVERS", tmp_path)
    words = ("bench", world / "run.toml", "--output", tmp_path, "--against", "transformers")
    assert "pip install -e . -c constraints.txt" in refused(*words)


@pytest.mark.slow
def test_a_row_that_two_ranks_share_counts_once_for_the_peer(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = tmp_path / "drivers"
    drivers.mkdir()
    (drivers / "comparable.py").write_text("def require_comparable(*_): ...")
    side = {"tokens_per_second": {"median": 1, "spread": 0}, "first_loss": 0}
    side |= {"memory_gib": {"reserved": 1, "allocated": None}}
    writing = f"open(sys.argv[1] + '/measured.json', 'w').write({json.dumps(side)!r})"
    (drivers / "transformers_steps.py").write_text(f"import sys; {writing}")
    monkeypatch.setattr(bench, "DRIVERS", drivers)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    words = ("bench", world / "run.toml", "--output", tmp_path, "--against", "transformers")
    words += ("--job.name", "tiny", "--cpus", 2, "--parallelism.context_parallel_degree", 2)
    words += ("--data.document_mask", "false", "--steps", WINDOW)
    assert bench.run([*map(str, words[1:])]) == 0
    record = json.loads((tmp_path / "tiny.json").read_text())
    assert record["transformers"]["task"]["tokens_of_steps"] == [4 * 32] * 10


@pytest.mark.slow
def test_experts_are_balanced_by_force_where_that_is_said(world: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tokens = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    tiny_config("qwen3_moe", **tokens).save_pretrained(folder)
    words = ("bench", world / "run.toml", "--model.config", folder, "--steps", 1)
    said = lacuna(*words, "--output", tmp_path, "--job.name", "even", "--balanced-experts")
    assert "experts are balanced by force" in said
    assert "a time, of another model than this run trains" in said
    assert json.loads((tmp_path / "even.json").read_text())["balanced_experts"] is True


def test_balance_by_force_is_refused_where_it_says_nothing(world: Path, tmp_path: Path) -> None:
    words = ("bench", world / "run.toml", "--balanced-experts", "--output", tmp_path)
    assert "the peer's routers" in refused(*words, "--against", "transformers")
    assert "has no stacks of experts" in lacuna(*words, "--steps", 1, status=2)
    training = ("train", world / "run.toml", "--balanced-experts", "--dry-run")
    assert "balanced_experts: there is no such setting" in refused(*training)
