"""What the name of a model stands for: a folder, the Hub, or a run's final or newest weights."""

import json
import os
from pathlib import Path

from huggingface_hub import model_info, try_to_load_from_cache
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from transformers.utils import CONFIG_NAME

from lacuna.config import UserError, explained, logger
from lacuna.config.adapters import ADAPTER_FILE
from lacuna.config.errors import nearby
from lacuna.data.unpacked import hf_folder
from lacuna.formats.checkpoint import (
    FINISHED,
    MANIFEST,
    listed_steps,
    newest_complete,
    require_complete,
)
from lacuna.parallel.processes import Process


def find_form(source: str) -> tuple[str, bool]:
    """The folder or Hub id to load for `source`, and whether it is a checkpoint.

    A run folder stands for its final model, or while that is not there, or the run has gone on
    since, for its newest complete checkpoint. Raises `UserError` when there is nothing to load.
    """
    if os.path.exists(os.path.join(source, MANIFEST)):
        return require_complete(source, "MODEL", Process()), True
    checkpoints = os.path.join(source, "checkpoint")
    if _has_gone_on(source, checkpoints) and (newest := newest_complete(checkpoints, Process())):
        logger.warning("%s is newer than %s/hf, and taken", newest, source)
        return newest, True
    for folder in (source, os.path.join(source, "hf")):
        for file in (CONFIG_NAME, ADAPTER_FILE):
            if os.path.exists(os.path.join(folder, file)):
                return folder, False
    for folder in (checkpoints, source):
        newest = newest_complete(folder, Process())
        if newest:
            return newest, True
    if os.path.isdir(source):
        raise UserError(
            f"{source}: neither a Hugging Face folder (no config.json), nor a checkpoint "
            f"(no {MANIFEST}), nor a run folder (no hf/ and no complete checkpoint/step-N)."
        )
    if not source.endswith(".gguf"):
        require_on_hub(source)
    return hf_folder(source), False


def _has_gone_on(source: str, checkpoints: str) -> bool:
    """Whether a run has checkpoints of later steps than the one at which it came to an end."""
    try:
        ended = int(json.loads(Path(source, FINISHED).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        return False
    return max(listed_steps(checkpoints), default=0) > ended


def require_on_hub(name: str, asking: str = "") -> None:
    """Raises `UserError` unless a model of this name is on the Hub, or was downloaded from it.

    The Hub is asked once. Where the name is a misspelt folder, transformers would try for a minute
    to get several files. The message begins with what is `asking`.
    """
    problem = (
        f"{asking}{name}: there is no such folder here, and no such model on the Hub, or it cannot "
        f"be reached"
    )
    with explained(problem, OSError, ValueError, HTTPError, mend=nearby(Path(name))):
        if try_to_load_from_cache(name, CONFIG_NAME) is None:
            model_info(name, timeout=10)
