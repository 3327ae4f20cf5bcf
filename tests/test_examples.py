"""The example loop trains as `lacuna train` does, and goes on from its own checkpoint."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from runs import SOURCE, curve, environment, steps, together, train, weights

EXAMPLE = SOURCE.parent / "examples" / "own_loop.py"


def own_loop(world: Path, folder: Path, *flags: object, ranks: int = 1) -> list[float]:
    """Runs the example and returns the losses it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, EXAMPLE, world / "run.toml", "--job.dump_folder", folder, *flags]
    done = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_the_loop_of_your_own_trains_like_lacuna_and_resumes(world: Path, tmp_path: Path) -> None:
    flags = ("--lr_scheduler.decay_type", "constant")
    own, resumed, reference = tmp_path / "own", tmp_path / "resumed", tmp_path / "reference"
    half, whole, _ = together(
        lambda: own_loop(world, resumed, *flags, "--training.steps", 4),
        lambda: own_loop(world, own, *flags),
        lambda: train(world, reference, *flags),
    )
    losses = [loss for _, loss, _ in curve(reference)]
    assert whole == pytest.approx(losses, abs=1e-4)
    rest = own_loop(world, resumed, *flags)
    assert half + rest == whole
    assert weights(own) == weights(resumed) == weights(reference)


@pytest.mark.slow
def test_the_loop_of_your_own_runs_under_torchrun(world: Path, tmp_path: Path) -> None:
    own_loop(world, tmp_path / "own", ranks=2)
    train(world, tmp_path / "reference", "--cpus", 2)
    assert weights(tmp_path / "own") == weights(tmp_path / "reference")
    assert steps(tmp_path / "reference") == [4, 8]
