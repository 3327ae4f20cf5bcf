"""Epochs are passes: each trains every sample once, its last step smaller, on any layout."""

import shutil
from pathlib import Path

import pytest

from reference import texts_of
from runs import curve, lacuna, stop_after, together, train, weights

pytestmark = pytest.mark.slow  # whole runs of the command line

# 20 documents, each in a row, in steps of 8: the last one has 3 × 20 - 7 × 8 = 4.
EPOCHS, STEPS = 3, 8
FLAGS = (
    "--training.steps",
    "none",
    "--training.epochs",
    EPOCHS,
    "--packing.mode",
    "none",
    "--training.global_batch_size",
    8,
    "--training.seq_len",
    256,
)
TWO = ("--cpus", 2, "--training.batch_size", 4)
LAYOUTS = {
    "whole": ("--training.batch_size", 8),
    "shards, accumulated": ("--cpus", 2, "--training.batch_size", 1),
    "pipeline": (*TWO, "--parallelism.pipeline_parallel_degree", 2),
}
OTHERS = {
    "shards": TWO,
    "accumulated": ("--training.batch_size", 1),
    "replicas": (*TWO, "--parallelism.data_parallel_replicate_degree", 2),
    "tensor": (*TWO, "--parallelism.tensor_parallel_degree", 2),
    "context": (*TWO, "--parallelism.context_parallel_degree", 2),
}


@pytest.fixture(scope="module")
def small(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three passes over 20 documents, in several layouts."""
    folder = tmp_path_factory.mktemp("small")
    flags = ("--data.dataset", world / "validation.jsonl", *FLAGS)
    together(
        *(lambda name=name: train(world, folder / name, *flags, *LAYOUTS[name]) for name in LAYOUTS)
    )
    return folder


def test_all_passes_are_trained_and_nothing_else(small: Path, world: Path) -> None:
    once = sum(len(text) + 1 for text in texts_of(world / "validation.jsonl"))
    assert curve(small / "whole", "tokens")[-1] == (STEPS, EPOCHS * once)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "whole"])
def test_the_smaller_last_step_is_that_of_one_device(small: Path, layout: str) -> None:
    assert curve(small / layout, "tokens") == curve(small / "whole", "tokens")
    assert curve(small / layout) == [pytest.approx(row, rel=1e-4) for row in curve(small / "whole")]


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
def test_it_is_so_in_other_layouts(small: Path, layout: str, world: Path, tmp_path: Path) -> None:
    train(
        world,
        tmp_path / "run",
        "--data.dataset",
        world / "validation.jsonl",
        *FLAGS,
        *OTHERS[layout],
    )
    assert curve(tmp_path / "run") == [
        pytest.approx(row, rel=1e-4) for row in curve(small / "whole")
    ]


def test_a_run_by_epochs_goes_on_exactly_and_may_be_made_longer(
    small: Path, world: Path, tmp_path: Path
) -> None:
    flags = ("--data.dataset", world / "validation.jsonl", *FLAGS, *LAYOUTS["shards, accumulated"])
    stop_after(4, world, tmp_path / "run", *flags)
    train(world, tmp_path / "run", *flags)
    assert curve(tmp_path / "run") == curve(small / "shards, accumulated")
    assert weights(tmp_path / "run") == weights(small / "shards, accumulated")
    shutil.copytree(small / "whole", tmp_path / "longer")
    own = tmp_path / "longer" / "config.toml"
    lacuna("train", own, "--job.dump_folder", tmp_path / "longer", "--training.epochs", EPOCHS + 1)
    once = curve(small / "whole", "tokens")[-1][1] // EPOCHS
    assert curve(tmp_path / "longer", "tokens")[-1] == (STEPS + 3, (EPOCHS + 1) * once)
