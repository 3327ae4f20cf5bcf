"""Going back to an earlier step of a run: what was made after it is set aside, once."""

import os
import shutil
import tomllib
from pathlib import Path

from lacuna.config import Config, explained, logger
from lacuna.formats.checkpoint import checkpoint_path, listed_steps


def goes_back(config: Config) -> bool:
    """Whether the run is to go back to `checkpoint.load_step`, or on from where it went back to.

    The settings of the start before, which are in the run folder, tell: the same command again goes
    on.
    """
    step, path = config.checkpoint.load_step, Path(str(config.job.dump_folder), "config.toml")
    if step < 0 or not path.exists():
        return step >= 0
    problem = (
        f"checkpoint.load_step: whether the run has gone back to step {step} before cannot be read "
        f"from {path}"
    )
    with explained(problem, ValueError, mend="remove that file to go back to it now"):
        before = tomllib.loads(path.read_text()).get("checkpoint", {})
    return bool(before.get("load_step") != step)


def set_aside(config: Config, folder: str) -> None:
    """Renames what the run made after `checkpoint.load_step`.

    That is checkpoints in `folder`, metrics and the final model. The newest goes first, so that
    whoever is killed here finds a run that merely ended earlier.
    """
    step, run = config.checkpoint.load_step, str(config.job.dump_folder)
    left = [
        checkpoint_path(folder, later) for later in reversed(listed_steps(folder)) if later > step
    ]
    done = [
        path for name in ("finished.json", "hf") if os.path.exists(path := os.path.join(run, name))
    ]
    if not left and not done:
        return
    number = 1
    while os.path.exists(aside := os.path.join(run, f"left-at-step-{step}-{number}")):
        number += 1
    os.makedirs(aside)
    if os.path.exists(rows := os.path.join(run, "metrics.jsonl")):
        shutil.copy(rows, aside)
    for path in (*done, *left):
        os.rename(path, os.path.join(aside, os.path.basename(path)))
    logger.warning(
        "going back to step %d: %d later checkpoints, if any, are set aside in %s",
        step,
        len(left),
        aside,
    )
