"""Checkpoints on disk: written whole or not at all, checked before they are believed, readable in any layout."""

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lacuna.config import UserError
from lacuna.config.errors import RunError
from lacuna.parallel.processes import Process, gather_objects, on_first

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.pt"
DESCRIPTION = "hf"
UNFINISHED = ".unfinished-"
REMOVED = ".removed-"


def checkpoint_path(folder: str, step: int) -> str:
    """Where the checkpoint of `step` lives."""
    return os.path.join(folder, f"step-{step}")


def listed_steps(folder: str) -> list[int]:
    """The steps of the checkpoints in `folder`, oldest first, without looking into them."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name)))


def clean_up(folder: str) -> None:
    """Deletes what a killed run left half written or half deleted."""
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if name.startswith((UNFINISHED, REMOVED)):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _checksum(path: str) -> list[int]:
    """Size and CRC-32 of a file."""
    size = checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return [size, checksum]


def _files(path: str) -> list[str]:
    found = [os.path.join(base, name) for base, _, names in os.walk(path) for name in names]
    return sorted(os.path.relpath(name, path) for name in found if os.path.basename(name) != MANIFEST)


def _sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def find_damage(path: str, process: Process) -> str | None:
    """What is wrong with the checkpoint at `path`, or None. The ranks share the reading; all get the same answer."""
    manifest_path = os.path.join(path, MANIFEST)
    if not os.path.exists(manifest_path):
        return f"{MANIFEST} is missing: it was never finished"
    try:
        with open(manifest_path) as file:
            manifest: dict[str, list[int]] = json.load(file)
    except ValueError:
        return f"{MANIFEST} is damaged"
    problem = None
    for name in sorted(manifest)[process.rank :: process.world_size]:
        target = os.path.join(path, name)
        if not os.path.exists(target):
            problem = f"{name} is missing"
        elif os.path.getsize(target) != manifest[name][0]:
            problem = f"{name} has {os.path.getsize(target)} bytes instead of {manifest[name][0]}"
        elif _checksum(target) != manifest[name]:
            problem = f"{name} is damaged (its checksum differs)"
    return next((found for found in gather_objects(process, problem) if found), None)


def newest_complete(folder: str, process: Process) -> str | None:
    """The newest checkpoint in `folder` that is complete; damaged ones are named in the log and skipped."""
    for step in reversed(on_first(process, lambda: listed_steps(folder))):
        path = checkpoint_path(folder, step)
        damage = find_damage(path, process)
        if damage is None:
            return path
        logger.warning("skipping the damaged checkpoint %s: %s", path, damage)
    return None


def require_complete(path: str, setting: str, process: Process) -> str:
    """`path`, after checking it. Raises `UserError`, naming `setting`, when it is missing or damaged."""
    if not os.path.isdir(path):
        raise UserError(f"{setting}: there is no checkpoint {path}.")
    damage = find_damage(path, process)
    if damage is not None:
        raise UserError(f"{setting}: the checkpoint {path} cannot be used: {damage}.")
    return path


def write_checkpoint(
    path: str,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    describe: Callable[[str], None],
    process: Process,
) -> None:
    """Writes `tensors` (sharded ones by their shards) and the small `state` to `path`; all ranks must call it.

    Everything goes to a hidden folder beside it, is checksummed, and only then renamed, so that a folder named
    `step-N` is always complete. `describe(folder)` adds the model's configuration and tokenizer. Raises `RunError`
    on all ranks when the disk refuses.
    """
    unfinished = os.path.join(os.path.dirname(path), UNFINISHED + os.path.basename(path))
    written: dict[str, list[int]] = {}
    failure = None
    try:
        on_first(process, lambda: _fresh_folder(unfinished))
        dcp.save(tensors, storage_writer=_Writer(unfinished), process_group=process.control)
        own = (name for name in os.listdir(unfinished) if name.startswith(f"__{process.rank}_"))
        written = {name: _checksum(os.path.join(unfinished, name)) for name in own}
    except (OSError, CheckpointException, RuntimeError) as error:
        failure = _reason(error)
    reports = gather_objects(process, (failure, written))
    failure = next((found for found, _ in reports if found), None)
    if failure is None:
        manifest = {name: checksum for _, part in reports for name, checksum in part.items()}
        failure = on_first(process, lambda: _seal(path, unfinished, state, describe, manifest))
    if failure is not None:
        free = shutil.disk_usage(os.path.dirname(path)).free
        if process.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        full = "the disk is full: " if free < 2**20 else ""
        raise RunError(
            f"cannot write the checkpoint {path}: {full}{failure}. Earlier checkpoints are intact; the same command "
            f"goes on from the newest of them."
        )


class _Writer(dcp.FileSystemWriter):
    """Raises what the system said: torch's own error, which follows from it, is about a position in a file."""

    def write_data(self, *arguments: Any) -> Any:
        try:
            return super().write_data(*arguments)
        except RuntimeError as error:
            raise error.__context__ or error from None


def _reason(error: BaseException) -> str:
    """What went wrong on one rank; torch wraps it in the tracebacks of all."""
    return str(next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error)


def _fresh_folder(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)


def _seal(
    path: str, unfinished: str, state: dict[str, Any], describe: Callable[[str], None], manifest: dict[str, list[int]]
) -> str | None:
    """Adds state, description and manifest, then gives the folder its name. Returns what went wrong, if anything."""
    try:
        torch.save(state, os.path.join(unfinished, STATE))
        describe(os.path.join(unfinished, DESCRIPTION))
        rest = {name: _checksum(os.path.join(unfinished, name)) for name in _files(unfinished) if name not in manifest}
        with open(os.path.join(unfinished, MANIFEST), "w") as file:
            json.dump({**manifest, **rest}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(unfinished)
        if os.path.isdir(path):  # a damaged one that was skipped, or the same step saved again
            remove_checkpoint(path)
        os.replace(unfinished, path)
        _sync_folder(os.path.dirname(path))
    except Exception as error:  # of the disk, whatever type the libraries give it; raised again as RunError
        return _reason(error)
    return None


def remove_checkpoint(path: str) -> None:
    """Deletes a checkpoint; it loses its name first, so that a kill in between cannot leave half of it."""
    hidden = os.path.join(os.path.dirname(path), REMOVED + os.path.basename(path))
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def read_state(path: str) -> dict[str, Any]:
    """The small state (step, counters, data position, random states) of the checkpoint at `path`."""
    return torch.load(os.path.join(path, STATE), weights_only=True, map_location="cpu")


def read_tensors(path: str, tensors: dict[str, Tensor], process: Process) -> None:
    """Fills `tensors` in place from the checkpoint at `path`, whatever layout wrote it.

    Raises `UserError` when it holds other tensors: the model's configuration is another one.
    """
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in saved:
            raise UserError(f"checkpoint {path}: it has no {name!r}: it belongs to another model configuration.")
        if saved[name].size != tensor.shape:
            raise UserError(
                f"checkpoint {path}: {name!r} has the shape {tuple(saved[name].size)}, the model "
                f"{tuple(tensor.shape)}: it belongs to another model configuration."
            )
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), process_group=process.control)


def has_optimizer(path: str) -> bool:
    """Whether the checkpoint holds an optimizer's state, or weights only."""
    return any(name.startswith("optimizer.") for name in dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
