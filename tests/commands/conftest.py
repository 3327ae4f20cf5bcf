"""What the tests of several commands share."""

from pathlib import Path

import pytest

from runs import train


@pytest.fixture(scope="session")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with checkpoints of steps 40 and 80, to be read only."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(world, folder, "--training.steps", 80, "--checkpoint.interval", 40)
    return folder
