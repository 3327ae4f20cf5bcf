"""Writes checkpoints, whole or not at all."""

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from lacuna.config import RunError
from lacuna.data.disk import sync, sync_all
from lacuna.formats.checkpoint import (
    DESCRIPTION,
    MANIFEST,
    STATE,
    checksum_of,
    remove_checkpoint,
)
from lacuna.parallel.processes import Process, gather_objects, on_first


def write_checkpoint(
    path: str,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    describe: Callable[[str], None],
    process: Process,
) -> None:
    """Writes `tensors` (sharded ones by their shards) and the small `state` to `path`.

    All ranks must call it. Everything goes to a hidden folder beside it, is checksummed, and only
    then renamed, so that a folder named `step-N` is always complete. `describe(folder)` adds the
    model's configuration and tokenizer. Raises `RunError` on all ranks when the disk refuses.
    """
    folder, name = os.path.split(path)
    unfinished = os.path.join(folder, f".unfinished-{name}")
    try:
        on_first(process, lambda: shutil.rmtree(unfinished, ignore_errors=True))
        _write_tensors(unfinished, tensors, process)
        own = {
            file.name: checksum_of(file) for file in Path(unfinished).glob(f"__{process.rank}_*")
        }
        manifest = {
            name: checksum
            for part in gather_objects(process, own)
            for name, checksum in part.items()
        }
        on_first(process, lambda: _complete_checkpoint(path, unfinished, state, describe, manifest))
    except OSError as error:
        if process.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise RunError(
            f"cannot write the checkpoint {path}: {error}. Earlier checkpoints are intact; the "
            f"same command goes on from the newest of them."
        ) from error


def _write_tensors(folder: str, tensors: dict[str, Tensor], process: Process) -> None:
    """Writes what this rank holds. Raises, on all ranks, the first error that any of them had."""
    try:
        save(tensors, storage_writer=_Writer(folder), process_group=process.control)
    except CheckpointException as error:
        raise first_failure(error) from error


def first_failure(error: CheckpointException) -> BaseException:
    """What went wrong on one rank, which torch wraps in the tracebacks of all."""
    return next(iter(error.failures.values()))[0]


class _Writer(FileSystemWriter):
    """torch's writer, which here raises the system's own error, not torch's that follows it."""

    def write_data(self, *arguments: Any) -> Any:
        try:
            return super().write_data(*arguments)
        except RuntimeError as error:
            raise error.__context__ or error from None


def _complete_checkpoint(
    path: str,
    unfinished: str,
    state: dict[str, Any],
    describe: Callable[[str], None],
    manifest: dict[str, list[int]],
) -> None:
    """Adds the state, the description and the manifest, then gives the folder its name.

    The `manifest` has the checksums of the tensors' files already.
    """
    content = io.BytesIO()
    torch.save(state, content)
    Path(unfinished, STATE).write_bytes(content.getvalue())
    describe(os.path.join(unfinished, DESCRIPTION))
    for file in Path(unfinished).rglob("*"):
        name = str(file.relative_to(unfinished))
        if file.is_file() and name not in manifest:
            manifest[name] = checksum_of(file)
    Path(unfinished, MANIFEST).write_text(json.dumps(manifest))
    sync_all(unfinished)
    if os.path.isdir(path):  # a damaged one that was skipped, or the same step saved again
        remove_checkpoint(path)
    os.replace(unfinished, path)
    sync(os.path.dirname(path))
