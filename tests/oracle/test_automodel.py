"""NeMo AutoModel's recipe beside ours: its driver in benchmarks/ makes the same steps of a run."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from runs import SOURCE, environment, lacuna

# nemo-automodel wants another transformers than the constraints have, so that no other test can
# run beside it: docs/benchmark.md says how both are put into a folder that PYTHONPATH names.
FOUND = find_spec("nemo_automodel")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOUND, reason="nemo-automodel is not installed"),
]

SHARDED = ("--cpus", 2, "--training.batch_size", 2)
BY_OPERATION = (
    *("--activation_checkpoint.mode", "selective"),
    *("--activation_checkpoint.selective_ac_option", "op"),
)


def measured(world: Path, folder: Path, *flags: object) -> dict[str, Any]:
    """What `lacuna bench` wrote of both."""
    words = ("--steps", 1, "--output", folder, "--optimizer.weight_decay", 0)
    words += ("--data.document_mask", "false", "--job.name", "tiny", "--against", "automodel")
    folders = [str(SOURCE), str(Path(str(FOUND.origin)).parents[1])] if FOUND else []
    told = environment(PYTHONPATH=os.pathsep.join(folders))
    lacuna("bench", world / "run.toml", *words, *flags, env=told, timeout=240)
    record: dict[str, Any] = json.loads((folder / "tiny.json").read_text())
    assert record["ratio"]["tokens_per_second"] > 0
    return record


@pytest.mark.parametrize(
    "flags",
    [
        (),
        SHARDED,
        (*SHARDED, *BY_OPERATION, "--training.gradient_accumulation_steps", 2),
        (*SHARDED, "--compile.enable", "true", "--training.max_norm", 0),
    ],
)
def test_the_steps_have_the_same_losses(
    world: Path, tmp_path: Path, flags: tuple[object, ...]
) -> None:
    record = measured(world, tmp_path, *flags)
    own = record["lacuna"]
    losses = [own["first_loss"], *(window["loss"] for window in own["windows"])]
    others = record["automodel"]["losses"]
    assert len(others) == 6
    assert losses == pytest.approx([others[0], *others[-3:]], rel=1e-5)


def test_adapters_begin_alike(world: Path, tmp_path: Path) -> None:
    record = measured(world, tmp_path, "--lora.rank", 4)
    first = record["automodel"]["first_loss"]
    assert record["lacuna"]["first_loss"] == pytest.approx(first, rel=1e-5)
    assert record["automodel"]["losses"][-1] != first
