"""Finished runs that the tests of checkpoints copy."""

from pathlib import Path

import pytest

from runs import together, train


@pytest.fixture(scope="session")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("finished")
    straight, weights_only = folder / "straight", folder / "weights_only"
    together(
        lambda: train(world, straight, "--checkpoint.interval", 2),
        lambda: train(
            world,
            weights_only,
            "--checkpoint.interval",
            2,
            "--training.steps",
            4,
            "--checkpoint.model_weights_only",
            "--checkpoint.export_dtype",
            "bfloat16",
        ),
    )
    return straight, weights_only


@pytest.fixture(scope="session")
def straight(finished: tuple[Path, Path]) -> Path:
    """A run of 8 steps that saved after every second one; to be read only."""
    return finished[0]


@pytest.fixture(scope="session")
def weights_only(finished: tuple[Path, Path]) -> Path:
    """A run of 4 steps whose last checkpoint holds the weights alone, in bfloat16; to be read only."""
    return finished[1]
