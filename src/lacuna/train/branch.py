"""Going back to an earlier step of a run: what was made after it is set aside, once."""

import os
import shutil
import tomllib
from pathlib import Path

from lacuna.config import explained, logger
from lacuna.formats.checkpoint import checkpoint_path, listed_steps


def goes_back(folder: str, step: int) -> bool:
    """Whether the run in `folder` is to go back to a step, which is -1 where none is asked for.

    A command that is given again does not go back again: it goes on from what the run has made
    since. The settings of the previous start, which are in the folder, tell the two apart.
    """
    path = Path(folder, "config.toml")
    if step < 0 or not path.exists():
        return step >= 0
    problem = (
        f"checkpoint.load_step: whether the run has gone back to step {step} before cannot be read "
        f"from {path}"
    )
    with explained(problem, ValueError, mend="remove that file to go back to it now"):
        before = tomllib.loads(path.read_text()).get("checkpoint", {})
    return bool(before.get("load_step") != step)


def set_aside_later_steps(folder: str, checkpoints: str, step: int) -> None:
    """Moves what the run in `folder` made after a step to a folder inside it.

    That is checkpoints, metrics and the final model. The newest goes first: a run that is killed
    here looks like one that ended earlier.
    """
    later = [number for number in reversed(listed_steps(checkpoints)) if number > step]
    left = [checkpoint_path(checkpoints, number) for number in later]
    ends = (os.path.join(folder, name) for name in ("finished.json", "hf"))
    done = [path for path in ends if os.path.exists(path)]
    if not left and not done:
        return
    number = 1
    while os.path.exists(aside := os.path.join(folder, f"left-at-step-{step}-{number}")):
        number += 1
    os.makedirs(aside)
    rows = os.path.join(folder, "metrics.jsonl")
    if os.path.exists(rows):
        shutil.copy(rows, aside)
    for path in (*done, *left):
        os.rename(path, os.path.join(aside, os.path.basename(path)))
    said = "going back to step %d: %d later checkpoints, if any, are set aside in %s"
    logger.warning(said, step, len(left), aside)
