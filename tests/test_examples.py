"""The example loop trains as `lacuna train` does, and goes on from its own checkpoint."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lacuna.model.attention_choice import attention_choices
from lacuna.model.own_attention_choice import require_exact
from lacuna.parallel.mesh import Layout
from runs import SOURCE, curve, environment, lacuna, steps, together, train, weights
from tiny import CPU, tiny_config

EXAMPLE = SOURCE.parent / "examples" / "own_loop.py"


def own_loop(world: Path, folder: Path, *flags: object, ranks: int = 1) -> list[float]:
    """Runs the example and returns the losses it printed."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    command = [
        sys.executable,
        *launcher,
        EXAMPLE,
        world / "run.toml",
        "--job.dump_folder",
        folder,
        *flags,
    ]
    done = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.slow
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


def test_an_objective_of_your_own_trains_on_any_number_of_ranks_and_in_any_layout(
    world: Path, tmp_path: Path
) -> None:
    flags = ("--job.task", "own_objective:SmoothedModelling")
    layouts = {
        "one": (),
        "two": ("--cpus", 2, "--training.batch_size", 2),
        "pipeline": ("--cpus", 2, "--parallelism.pipeline_parallel_degree", 2),
    }
    together(
        *(
            lambda name=name: train(
                world, tmp_path / name, *flags, *layouts[name], cwd=EXAMPLE.parent
            )
            for name in layouts
        ),
        lambda: train(world, tmp_path / "plain"),
    )
    one, two, piped = (curve(tmp_path / name, "loss", "z_loss") for name in layouts)
    assert two == [pytest.approx(row, rel=1e-5) for row in one]
    assert piped == [pytest.approx(row, rel=1e-5) for row in one]
    (_, first, z_loss), *_ = one
    ((_, plain), *_) = curve(tmp_path / "plain", "loss")
    # Before the first update both see the same logits, of 257 nearly equal probabilities.
    assert z_loss == pytest.approx(math.log(257) ** 2, rel=0.05)
    assert first - 1e-4 * z_loss == pytest.approx(plain, rel=0.01)
    assert first != pytest.approx(plain, rel=1e-6)


@pytest.mark.slow
def test_an_attention_of_your_own_trains_on_two_ranks_and_in_any_layout(
    world: Path, tmp_path: Path
) -> None:
    flags = ("--model.attention", "own_attention:SOFTMAX_PLUS_ONE")
    shared = ("--cpus", 2, "--parallelism.context_parallel_degree", 2)
    layouts = {
        "one": (),
        "two": ("--cpus", 2, "--training.batch_size", 2),
        "gathered": (*shared, "--parallelism.context_parallel_rotate_method", "allgather"),
    }
    together(
        *(
            lambda name=name: train(
                world, tmp_path / name, *flags, *layouts[name], cwd=EXAMPLE.parent
            )
            for name in layouts
        ),
        lambda: train(world, tmp_path / "softmax"),
    )
    one, two, gathered = (curve(tmp_path / name) for name in layouts)
    assert two == [pytest.approx(row, rel=1e-5) for row in one]
    assert gathered == [pytest.approx(row, rel=1e-5) for row in one]
    assert one[-1] != pytest.approx(curve(tmp_path / "softmax")[-1], rel=1e-4)
    said = ("generate", tmp_path / "one", "--prompt", "the cat", "--max-new-tokens", 4)
    assert "--trust-remote-code" in lacuna(*said, status=2, cwd=EXAMPLE.parent)
    assert lacuna(*said, "--trust-remote-code", cwd=EXAMPLE.parent).endswith("\n")
    refusal = train(world, tmp_path / "ring", *flags, *shared, status=2, cwd=EXAMPLE.parent)
    assert "merge by log-sum-exp, as the ring of context parallelism needs" in refusal


def test_documents_in_a_row_are_to_that_attention_as_they_are_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(EXAMPLE.parent)
    model_config = tiny_config("gemma3")
    given = (True, model_config, "cpu", torch.float32, Layout())
    [name] = attention_choices("own_attention:SOFTMAX_PLUS_ONE", *given)
    require_exact(name, model_config, "packed", 64, CPU, torch.float32)
