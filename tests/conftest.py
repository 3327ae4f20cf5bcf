"""Fixtures that tests of several rooms share."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported: no test may wait for a network

from runs import SOURCE, make_world, together, train

# Imported once, in a server that has no threads and no groups: ranks and whole runs are forked from
# it.
multiprocessing.set_forkserver_preload(["preloaded"])
# Where that server, which is told no paths, finds it.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(SOURCE)])


@pytest.fixture(scope="module", autouse=True)
def _leaves_no_group() -> Iterator[None]:
    """No module leaves this process in a group, where tests of another could not make their own."""
    yield
    was_left = dist.is_initialized()
    if was_left:
        dist.destroy_process_group()  # or tests of the next modules failed too
    assert not was_left, "a test of this module has left a process group behind"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model, data and run.toml. Tests only read them; runs keep their caches beside them."""
    folder = make_world(tmp_path_factory.mktemp("world"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        yield folder


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
    """A run of 4 steps whose last checkpoint has only the weights, in bfloat16; to be read only."""
    return finished[1]
