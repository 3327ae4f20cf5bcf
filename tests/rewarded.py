"""Runs by rewards: prompts, the flags of a short run, and the completions that it keeps."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from runs import ended, rows, start, train, wait_until, write_model

CHAT = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
KEYS = ("loss", "grad_norm", "reward", "entropy", "clipped", "mismatch_mean", "tokens")
"""What two runs that are the same have in common in their log."""

_CONTEXT = ("--parallelism.context_parallel_degree", 2)
_GATHERED = (*_CONTEXT, "--parallelism.context_parallel_rotate_method", "allgather")
_TENSOR = ("--parallelism.tensor_parallel_degree", 2)
_REPLICAS = (
    *("--parallelism.data_parallel_replicate_degree", 2),
    *("--parallelism.data_parallel_shard_degree", 1),
)
SHARED_LAYOUTS: dict[str, tuple[object, ...]] = {
    "cp 2, ring": ("--cpus", 2, *_CONTEXT),
    "cp 2, all-gather": ("--cpus", 2, *_GATHERED, "--packing.mode", "none"),
    "tp 2": ("--cpus", 2, *_TENSOR),
    "tp 2, loss of whole sequences": (
        *("--cpus", 2, *_TENSOR, "--parallelism.disable_loss_parallel", "true"),
    ),
    "cp 2 × tp 2": ("--cpus", 4, *_CONTEXT, *_TENSOR),
    "dp_shard 2 × cp 2": ("--cpus", 4, *_CONTEXT, "--training.batch_size", 2),
    "dp_shard 2 × tp 2": ("--cpus", 4, *_TENSOR, "--training.batch_size", 2),
    "dp_replicate 2 × tp 2": ("--cpus", 4, *_TENSOR, *_REPLICAS, "--training.batch_size", 2),
    "dp_replicate 2 × cp 2": ("--cpus", 4, *_CONTEXT, *_REPLICAS, "--training.batch_size", 2),
}
"""Flags of layouts whose ranks share sequences."""


def write_prompts(folder: Path) -> Path:
    """Texts and conversations of uneven lengths, and what their answers should have."""
    lines = []
    for number in range(30):
        row: dict[str, Any] = {"prompt": "ask " * (1 + number % 3) + str(number)}
        if number % 4 == 0:
            row = {"messages": [{"role": "user", "content": f"say {number}"}]}
        lines.append(json.dumps(row | {"answer": "[a-zA-Z]" if number % 5 else None}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))
    (folder / "chat.jinja").write_text(CHAT)
    return folder


def flags(prompts: Path, *more: object) -> list[object]:
    """The flags of a run on the prompts in a folder."""
    rewards: tuple[object, ...] = ()
    if "--rewards.functions" not in more:
        rewards = ("--rewards.functions", "pattern,length", "--rewards.length_margin", 3)
    return [
        *("--job.task", "grpo", "--data.dataset", prompts / "prompts.jsonl"),
        *("--chat.template", prompts / "chat.jinja", "--training.batch_size", 4),
        *("--rollout.samples", 4, "--rollout.max_tokens", 5, *rewards),
        *("--lr_scheduler.decay_type", "constant", *more),
    ]


def completions(folder: Path) -> list[dict[str, Any]]:
    """The rows of completions.jsonl, by bytes: completions may hold other ends of lines."""
    return [json.loads(line) for line in (folder / "completions.jsonl").read_bytes().splitlines()]


DEEP = ("--optimizer.lr", 1e-3)
"""Flags of one case whose model has two layers, which others have not (`shallow_model`)."""

InLayout = Callable[[str, str], Path]
"""Tells the folder of a run of four steps of a case in a layout, which is made once."""


def shallow_model(folder: Path) -> tuple[object, ...]:
    """Flags of a model with one layer: where samples are in a layout no layer knows."""
    return "--model.config", write_model(folder, num_hidden_layers=1), *DEEP


def made_once(world: Path, root: Path, flags_of: Callable[[str, str], list[object]]) -> InLayout:
    """Makes runs of four steps with the flags of a case and a layout, each when it is asked for."""

    @cache
    def made(case: str, layout: str) -> Path:
        folder = root / case / layout
        shutil.rmtree(folder, ignore_errors=True)  # what failed is not gone on with
        train(world, folder, *flags_of(case, layout), "--training.steps", 4)
        return folder

    return made


def rewards_until(
    enough: Callable[[list[float]], bool], last: int, recipe: str, folder: Path
) -> list[float]:
    """The rewards of a recipe's steps until they are enough, or until its step `last`.

    It is a run of all of the recipe's steps, as the learning rate depends on; the others are not
    made.
    """
    found: list[float] = []

    def is_over() -> bool:
        found[:] = [row["reward"] for row in rows(folder) if "reward" in row]
        return bool(found) and (len(found) >= last or enough(found))

    words = ("train", recipe, "--job.dump_folder", folder, "--metrics.log_freq", 1)
    with ended(start(*words)) as process:
        wait_until(is_over, process, timeout=600, pause=0.1)
    return found
