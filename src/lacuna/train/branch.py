"""Going back to an earlier step of a run: what was made after it is set aside, once."""

import os
import shutil

from lacuna.config import logger
from lacuna.formats.checkpoint import checkpoint_path, listed_steps


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
