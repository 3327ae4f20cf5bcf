"""A run that was stopped goes on as if it had not been."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load

from runs import checkpoint, curve, rows, steps, stop_after, together, train, weights, write_model

STEPS = 60


class Resumed(NamedTuple):
    """A straight run, one that SIGTERM stopped, and a copy of that one which went on to the end."""

    straight: Path
    stopped: Path
    resumed: Path
    flags: tuple
    goodbye: str
    output: str


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def run(
    request: pytest.FixtureRequest, world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Resumed:
    folder = tmp_path_factory.mktemp("resume")
    model = write_model(folder / "model", attention_dropout=0.1, tie_word_embeddings=True)
    flags = (
        "--cpus",
        request.param,
        "--model.config",
        model,
        "--training.steps",
        STEPS,
        "--training.batch_size",
        2,
        "--checkpoint.interval",
        10,
        "--validation.dataset",
        world / "validation.jsonl",
        "--validation.dataset_split",
        "train",
        "--validation.freq",
        25,
    )
    straight, stopped, resumed = folder / "straight", folder / "stopped", folder / "resumed"
    _, goodbye = together(
        lambda: train(world, straight, *flags), lambda: stop_after(12, world, stopped, *flags)
    )
    shutil.copytree(stopped, resumed)
    return Resumed(straight, stopped, resumed, flags, goodbye, train(world, resumed, *flags))


def test_sigterm_saves_the_step_it_stops_after_and_says_so(run: Resumed) -> None:
    last = steps(run.stopped)[-1]
    assert f"Stopped and saved after step {last}" in run.goodbye
    assert 12 <= last < STEPS
    assert rows(run.stopped)[-1]["step"] == last
    assert not (run.stopped / "hf").exists()
    assert f"resuming after step {last}" in run.output


def test_every_loss_and_gradient_norm_after_a_resume_equals_the_straight_runs(run: Resumed) -> None:
    assert [step for step, *_ in curve(run.straight)] == list(range(1, STEPS + 1))
    assert curve(run.resumed, "loss", "grad_norm", "lr", "tokens") == curve(
        run.straight, "loss", "grad_norm", "lr", "tokens"
    )
    measured = [
        [row for row in rows(folder) if "val_loss" in row] for folder in (run.straight, run.resumed)
    ]
    assert measured[0] == measured[1]
    assert [row["step"] for row in measured[0]] == [0, 25, 50, 60]


def test_final_weights_after_a_resume_are_the_straight_runs_to_the_byte(run: Resumed) -> None:
    assert weights(run.resumed) == weights(run.straight)


def test_a_resume_drops_metric_rows_beyond_its_checkpoint(
    run: Resumed, world: Path, tmp_path: Path
) -> None:
    if "2" in map(str, run.flags[:2]):
        pytest.skip("the number of ranks does not matter")
    folder = tmp_path / "run"
    shutil.copytree(run.stopped, folder)
    last = steps(folder)[-1]
    shutil.rmtree(checkpoint(folder, last))  # as if killed just before it
    before = steps(folder)[-1]
    assert f"resuming after step {before}" in train(world, folder, *run.flags)
    assert curve(folder) == curve(run.straight)
    assert weights(folder) == weights(run.straight)


def test_other_samples_are_refused_by_name_and_leave_the_run_as_it_was(
    run: Resumed, world: Path, tmp_path: Path
) -> None:
    if "2" in map(str, run.flags[:2]):
        pytest.skip("the number of ranks does not matter")
    folder = tmp_path / "run"
    shutil.copytree(run.stopped, folder)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    output = train(
        world, folder, *run.flags, "--training.seq_len", 16, "--training.seed", 1, status=2
    )
    assert "training.seq_len (was 32, is 16)" in output
    assert "training.seed (was 42, is 1)" in output
    assert "Traceback" not in output
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_layout_may_change_on_the_way(world: Path, tmp_path: Path) -> None:
    flags = (
        "--lr_scheduler.decay_type",
        "constant",
        "--training.global_batch_size",
        4,
        "--validation.dataset",
        world / "validation.jsonl",
        "--validation.dataset_split",
        "train",
        "--validation.freq",
        4,
    )
    train(world, tmp_path / "straight", "--training.steps", 12, *flags)
    ways = (
        (4, "--cpus", 2, "--parallelism.tensor_parallel_degree", 2),
        (8, "--cpus", 2, "--parallelism.pipeline_parallel_degree", 2),
        (12, "--cpus", 2, "--parallelism.context_parallel_degree", 2),
    )
    for last, *way in ways:
        train(world, tmp_path / "changing", "--training.steps", last, *flags, *way)
    straight, changing = (
        [
            row.get(key, 0.0)
            for row in rows(tmp_path / name)
            for key in ("loss", "grad_norm", "val_loss")
        ]
        for name in ("straight", "changing")
    )
    assert changing == pytest.approx(straight, rel=1e-5)
    expected, exported = load(weights(tmp_path / "straight")), load(weights(tmp_path / "changing"))
    assert expected.keys() == exported.keys()
    # Where a gradient is next to nothing, AdamW makes a step of its rounding.
    assert all(torch.allclose(exported[name], expected[name], atol=3e-5) for name in expected)


@pytest.mark.slow
def test_ranks_may_change_from_1_to_2_to_4_to_1_on_the_way(world: Path, tmp_path: Path) -> None:
    flags = ("--lr_scheduler.decay_type", "constant")
    train(world, tmp_path / "straight", "--training.steps", 40, *flags)
    for ranks, last in ((1, 10), (2, 20), (4, 30), (1, 40)):
        output = train(
            world, tmp_path / "changing", "--training.steps", last, "--cpus", ranks, *flags
        )
        assert " steps of 4 × 32 tokens" in output, "the global batch stays"
    straight, changing = (
        curve(tmp_path / "straight", "loss", "tokens"),
        curve(tmp_path / "changing", "loss", "tokens"),
    )
    assert [(step, tokens) for step, _, tokens in straight] == [
        (step, tokens) for step, _, tokens in changing
    ]
    assert [loss for _, loss, _ in changing] == pytest.approx(
        [loss for _, loss, _ in straight], rel=1e-5
    )
