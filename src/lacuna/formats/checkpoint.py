"""Checkpoints in a folder: which there are, whether they are whole, and what they hold."""

import json
import os
import shutil
import zlib
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import UserError, explained, logger
from lacuna.model.architecture import stored_tensors
from lacuna.parallel.precision import kept_in_float32
from lacuna.parallel.processes import Process, gather_objects, on_first

# In the folder of a run that came to its end: at which step, and with what settings.
FINISHED = "finished.json"
# The files of a checkpoint beside those of its tensors.
MANIFEST = "manifest.json"
METADATA = ".metadata"
STATE = "state.pt"
DESCRIPTION = "hf"
RUN = "config.toml"  # in the description, where the tensors are adapters


def checkpoint_path(folder: str, step: int) -> str:
    """Where the checkpoint of `step` lives."""
    return os.path.join(folder, f"step-{step}")


def listed_steps(folder: str) -> list[int]:
    """The steps of the checkpoints in `folder`, oldest first, without looking into them."""
    endings = (path.name.removeprefix("step-") for path in Path(folder).glob("step-*"))
    return sorted(int(step) for step in endings if step.isdecimal())


def prepare_folder(folder: str) -> None:
    """Makes the folder of a run's checkpoints; deletes what a killed run left there unfinished."""
    mend = "choose another job.dump_folder or checkpoint.folder"
    with explained(f"checkpoint.folder: cannot write to {folder!r}", OSError, mend=mend):
        os.makedirs(folder, exist_ok=True)
        TemporaryFile(dir=folder).close()
    for step in listed_steps(folder):
        path = checkpoint_path(folder, step)
        if os.path.isfile(path):
            raise UserError(
                f"{path} is a file, where the checkpoint of a step belongs: move it away."
            )
    for left in Path(folder).glob(".*-step-*"):
        shutil.rmtree(left, ignore_errors=True)


def checksum_of(path: str | Path) -> list[int]:
    """Size and CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
        return [file.tell(), checksum]


def _read_manifest(path: str) -> dict[str, list[int]]:
    """Size and checksum of each file of the checkpoint at `path`.

    Raises `ValueError` when these cannot be all of them.
    """
    listed = dict(json.loads(Path(path, MANIFEST).read_text()))
    manifest = {name: [*map(int, pair)] for name, pair in listed.items()}
    outside = any(os.path.isabs(name) or ".." in Path(name).parts for name in manifest)
    lacking = not {STATE, METADATA} <= manifest.keys()
    if outside or lacking or any(len(pair) != 2 for pair in manifest.values()):
        raise ValueError
    return manifest


def find_damage(path: str, process: Process) -> str | None:
    """What is wrong with the checkpoint at `path`, or None.

    The ranks share the reading; all get the same answer.
    """
    problem = None
    try:
        manifest = _read_manifest(path)
        for name in sorted(manifest)[process.rank :: process.world_size]:
            size, checksum = checksum_of(Path(path, name))
            wanted_size, wanted_checksum = manifest[name]
            if size != wanted_size:
                problem = f"{name} has {size} bytes instead of {wanted_size}"
            elif checksum != wanted_checksum:
                problem = f"{name} is damaged (its checksum differs)"
    except FileNotFoundError as error:
        problem = f"{os.path.relpath(error.filename, path)} is missing"
    except NotADirectoryError:
        problem = "it is a file"
    except (ValueError, TypeError, RecursionError, IsADirectoryError):
        problem = f"{MANIFEST} is damaged"
    return next((found for found in gather_objects(process, problem) if found), None)


def newest_complete(folder: str, process: Process) -> str | None:
    """The newest complete checkpoint in `folder`; damaged ones are named in the log and skipped."""
    for step in reversed(on_first(process, lambda: listed_steps(folder))):
        path = checkpoint_path(folder, step)
        damage = find_damage(path, process)
        if damage is None:
            return path
        logger.warning("skipping the damaged checkpoint %s: %s", path, damage)
    return None


def require_complete(path: str, setting: str, process: Process) -> str:
    """`path`, after checking it.

    Raises `UserError`, naming `setting`, when it is missing or damaged.
    """
    if not os.path.isdir(path):
        raise UserError(f"{setting}: there is no checkpoint {path}.")
    damage = find_damage(path, process)
    if damage is not None:
        raise UserError(f"{setting}: the checkpoint {path} cannot be used: {damage}.")
    return path


def remove_checkpoint(path: str) -> None:
    """Deletes a checkpoint.

    It loses its name first, so that a kill in between cannot leave half of it.
    """
    hidden = os.path.join(os.path.dirname(path), f".removed-{os.path.basename(path)}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def model_tensors(model: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What a checkpoint holds of a model: weights and persistent buffers as `model.<name>`.

    Tied weights are there once. If some weights are frozen, only those that are trained are there:
    the others can be read again from where they came from. Nothing is copied unless a `dtype` asks
    for it.
    """
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    tensors = {
        name: tensor.detach()
        for name, tensor in stored_tensors(model).items()
        if tensor.requires_grad or is_whole
    }
    if dtype is not None:
        cast = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
        for name in cast - kept_in_float32(model, dtype):
            tensors[name] = tensors[name].to(dtype)
    return {f"model.{name}": tensor for name, tensor in tensors.items()}
