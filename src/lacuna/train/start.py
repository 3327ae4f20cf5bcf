"""From which checkpoint a run starts or goes on."""

import tomllib
from pathlib import Path
from typing import Any

from lacuna.config import UserError, explained, logger
from lacuna.config.machine import CheckpointConfig
from lacuna.formats.checkpoint import (
    checkpoint_path,
    listed_steps,
    newest_complete,
    require_complete,
)
from lacuna.formats.reader import read_state
from lacuna.parallel.processes import Process, on_first


def find_start(
    settings: CheckpointConfig, folder: str, back: bool, process: Process
) -> tuple[str | None, dict[str, Any] | None]:
    """The checkpoint that the weights come from, if any, and the saved state if a run goes on.

    That is the newest complete checkpoint in `folder`, or with `back` that of
    `checkpoint.load_step`. From `step-0` and `checkpoint.initial_load_path` only the weights are
    taken. Raises `UserError` for a checkpoint that cannot be used.
    """
    path = None
    if back:
        asked = checkpoint_path(folder, settings.load_step)
        path = require_complete(asked, "checkpoint.load_step", process)
    elif settings.enable_checkpoint:
        path = _newest_to_go_on_from(folder, process)
        if settings.load_step >= 0:
            logger.info(
                "step %d was gone back to by the start before: going on; to go back once more, "
                "move the checkpoints after it away",
                settings.load_step,
            )
    if path is not None:
        state = read_state(path)
        step = state["loop"]["step"]
        if step > 0:
            if "source" not in state:
                raise UserError(
                    f"checkpoint.model_weights_only: {path} holds weights only, so the run cannot "
                    f"go on from it: start a new run with checkpoint.initial_load_path = {path!r}."
                )
            logger.info("resuming after step %d from %s", step, path)
            return path, state
    elif settings.initial_load_path:
        setting = "checkpoint.initial_load_path"
        path = require_complete(settings.initial_load_path, setting, process)
    if path is not None:
        logger.info("starting from the weights in %s", path)
    return path, None


def _newest_to_go_on_from(folder: str, process: Process) -> str | None:
    """The newest complete checkpoint in `folder`.

    Raises `UserError` where steps were saved and none of them is complete: a run does not start
    over by itself.
    """
    path = newest_complete(folder, process)
    steps = on_first(process, lambda: listed_steps(folder))
    done = [step for step in steps if step > 0]
    if done and path in (None, checkpoint_path(folder, 0)):
        raise UserError(
            f"of the checkpoints in {folder} ({len(done)} beyond step 0) none is complete: put one "
            f"back, or to start over on purpose move that folder away, or choose another "
            f"job.dump_folder."
        )
    return path


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
