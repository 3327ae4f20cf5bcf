"""Checkpoints are written when they should be, also behind the training; the right ones stay."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from lacuna.config import Config
from lacuna.parallel.processes import Process
from lacuna.train.saver import CheckpointSaver
from runs import checkpoint, curve, ended, rows, start, steps, together, train, wait_until, weights

pytestmark = pytest.mark.slow  # whole runs of the command line


@pytest.fixture(scope="module")
def runs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs: one only wrote a seed, one saved each step behind the training, one each second."""
    folder = tmp_path_factory.mktemp("saver")
    runs = {name: folder / name for name in ("seed", "async", "timed")}
    together(
        lambda: train(world, runs["seed"], "--checkpoint.create_seed_checkpoint"),
        lambda: train(
            world, runs["async"], "--checkpoint.interval", 1, "--checkpoint.async_mode", "async"
        ),
        lambda: save_by_time(world, runs["timed"]),
    )
    return runs


def save_by_time(world: Path, folder: Path) -> None:
    """A run that saves every second, stopped once it has three checkpoints."""
    flags = (
        "--checkpoint.interval_type",
        "seconds",
        "--checkpoint.interval",
        1,
        "--training.steps",
        100_000,
        "--metrics.log_freq",
        1000,
    )
    with ended(start("train", world / "run.toml", "--job.dump_folder", folder, *flags)) as process:
        wait_until(lambda: len(steps(folder)) >= 3, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def kept(
    world: Path, runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Runs from a seed on one rank and on two, and the first one continued.

    Their learning rate rises too far, so that the first validation is the best.
    """
    folder = tmp_path_factory.mktemp("kept")
    one, two = (shutil.copytree(runs["seed"], folder / name) for name in ("one rank", "two ranks"))
    flags = (
        "--checkpoint.interval",
        2,
        "--checkpoint.keep_latest_k",
        2,
        "--checkpoint.keep_best",
        "--validation.dataset",
        world / "validation.jsonl",
        "--validation.dataset_split",
        "train",
        "--validation.freq",
        3,
        "--lr_scheduler.warmup_steps",
        8,
    )
    outputs = together(
        lambda: train(world, one, *flags, "--optimizer.lr", 0.2),
        lambda: train(world, two, "--cpus", 2, "--training.batch_size", 2, "--training.steps", 2),
    )
    for run, output in zip((one, two), outputs, strict=True):
        assert f"starting from the weights in {checkpoint(run, 0)}" in " ".join(output.split())
    further = shutil.copytree(one, folder / "further")
    train(world, further, *flags, "--optimizer.lr", 5.0, "--training.steps", 12)
    return {run.name: run for run in (one, two, further)}


def test_a_seed_checkpoint_is_all_that_its_run_writes(runs: dict[str, Path]) -> None:
    assert steps(runs["seed"]) == [0]
    assert rows(runs["seed"]) == []
    assert not (runs["seed"] / "hf").exists()


def test_a_seeded_run_has_the_first_loss_of_the_unseeded_one_on_1_and_2_ranks(
    straight: Path, kept: dict[str, Path]
) -> None:
    assert curve(kept["one rank"])[0] == curve(straight)[0]
    assert curve(kept["two ranks"])[0] == pytest.approx(curve(straight)[0], rel=1e-5)


@pytest.mark.parametrize(("run", "latest"), [("one rank", [6, 8]), ("further", [10, 12])])
def test_the_latest_the_best_and_step_0_are_kept(
    kept: dict[str, Path], run: str, latest: list[int]
) -> None:
    losses = {row["step"]: row["val_loss"] for row in rows(kept[run]) if "val_loss" in row}
    assert min(losses, key=losses.__getitem__) == 3
    assert steps(kept[run]) == [0, 3, *latest]


def test_checkpoints_of_skipped_steps_push_none_out(tmp_path: Path) -> None:
    config = Config.model_validate({"checkpoint": {"keep_latest_k": 2}})
    saver = CheckpointSaver(config.checkpoint, str(tmp_path / "checkpoint"), os.mkdir, Process())
    for step, skipped in [(1, 0), (2, 0), (3, 0), (4, 1), (6, 3)]:
        saver.save(
            step,
            {"model.weight": torch.ones(2)},
            {"loop": {"step": step, "skipped_in_a_row": skipped}},
            wait=True,
        )
    assert steps(tmp_path) == [2, 3, 4, 6]
    saver.save(
        7, {"model.weight": torch.ones(2)}, {"loop": {"step": 7, "skipped_in_a_row": 0}}, wait=True
    )
    assert steps(tmp_path) == [6, 7], "what followed from them was trained further"


def test_the_time_of_a_best_checkpoint_is_not_taken_off_that_of_the_training_twice(
    kept: dict[str, Path],
) -> None:
    assert min(rate for _, rate in curve(kept["one rank"], "tokens_per_second")) > 0


def test_model_weights_only_leaves_the_optimizer_out_of_the_last_checkpoint(
    weights_only: Path,
) -> None:
    assert steps(weights_only) == [2, 4]
    names = [
        FileSystemReader(checkpoint(weights_only, step)).read_metadata().state_dict_metadata
        for step in (2, 4)
    ]
    assert [{name.partition(".")[0] for name in saved} for saved in names] == [
        {"model", "optimizer"},
        {"model"},
    ]


def test_interval_type_seconds_saves_by_time(runs: dict[str, Path]) -> None:
    written = [
        (checkpoint(runs["timed"], step) / "manifest.json").stat().st_mtime
        for step in steps(runs["timed"])[:3]
    ]
    assert written[2] - written[0] > 1, "two seconds, less what it took to write the first"


def test_asynchronous_checkpoints_are_the_synchronous_ones_to_the_byte(
    straight: Path, runs: dict[str, Path]
) -> None:
    assert steps(runs["async"]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert weights(runs["async"]) == weights(straight)
    for step in steps(straight):
        checksums = [manifest(run, step) for run in (straight, runs["async"])]
        assert checksums[0] == checksums[1]
        assert "__0_0.distcp" in checksums[0]


def manifest(run: Path, step: int) -> dict[str, list[int]]:
    """Size and checksum of a checkpoint's files, but those that name the folder and settings."""
    checksums = json.loads((checkpoint(run, step) / "manifest.json").read_text())
    return {
        name: checksum
        for name, checksum in checksums.items()
        if name not in (".metadata", "state.pt")
    }
