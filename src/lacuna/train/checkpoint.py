"""Checkpoints on disk: written whole or not at all, checked before they are believed, readable in any layout."""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from lacuna.config import Config, RunError, explained, logger, refuse
from lacuna.data import of_a_worker
from lacuna.data.disk import sync, sync_all
from lacuna.model.architecture import stored_tensors
from lacuna.parallel.precision import kept_in_float32
from lacuna.parallel.processes import Process, gather_objects, of_other_ranks, on_first
from lacuna.train.reader import METADATA, STATE, Reader, only_data

MANIFEST = "manifest.json"
DESCRIPTION = "hf"
RUN = "config.toml"  # in it, where the tensors are adapters


def checkpoint_path(folder: str, step: int) -> str:
    """Where the checkpoint of `step` lives."""
    return os.path.join(folder, f"step-{step}")


def listed_steps(folder: str) -> list[int]:
    """The steps of the checkpoints in `folder`, oldest first, without looking into them."""
    return sorted(
        int(step) for path in Path(folder).glob("step-*") if (step := path.name[5:]).isdecimal()
    )


def prepare_folder(folder: str) -> None:
    """Makes the folder of a run's checkpoints; deletes what a killed run left there half written or half deleted."""
    mend = "choose another job.dump_folder or checkpoint.folder"
    with explained(f"checkpoint.folder: cannot write to {folder!r}", OSError, mend=mend):
        os.makedirs(folder, exist_ok=True)
        TemporaryFile(dir=folder).close()
    files = [
        name
        for step in listed_steps(folder)
        if os.path.isfile(name := checkpoint_path(folder, step))
    ]
    refuse(
        {
            f"{name} is a file, where the checkpoint of a step belongs: move it away": True
            for name in files
        }
    )
    for path in Path(folder).glob(".*-step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _checksum(path: str | Path) -> list[int]:
    """Size and CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
        return [file.tell(), checksum]


def _manifest(path: str) -> dict[str, list[int]]:
    """Size and checksum of each file of the checkpoint at `path`. Raises `ValueError` when it cannot be all of them."""
    manifest = {
        name: [*map(int, pair)]
        for name, pair in dict(json.loads(Path(path, MANIFEST).read_text())).items()
    }
    outside = any(os.path.isabs(name) or ".." in Path(name).parts for name in manifest)
    if (
        outside
        or not {STATE, METADATA} <= manifest.keys()
        or any(len(pair) != 2 for pair in manifest.values())
    ):
        raise ValueError
    return manifest


def find_damage(path: str, process: Process) -> str | None:
    """What is wrong with the checkpoint at `path`, or None. The ranks share the reading; all get the same answer."""
    problem = None
    try:
        manifest = _manifest(path)
        for name in sorted(manifest)[process.rank :: process.world_size]:
            (size, checksum), wanted = _checksum(Path(path, name)), manifest[name]
            if size != wanted[0]:
                problem = f"{name} has {size} bytes instead of {wanted[0]}"
            elif checksum != wanted[1]:
                problem = f"{name} is damaged (its checksum differs)"
    except FileNotFoundError as error:
        problem = f"{os.path.relpath(error.filename, path)} is missing"
    except NotADirectoryError:
        problem = "it is a file"
    except (ValueError, TypeError, RecursionError, IsADirectoryError):
        problem = f"{MANIFEST} is damaged"
    return next((found for found in gather_objects(process, problem) if found), None)


def newest_complete(folder: str, process: Process) -> str | None:
    """The newest checkpoint in `folder` that is complete; damaged ones are named in the log and skipped."""
    for step in reversed(on_first(process, lambda: listed_steps(folder))):
        path = checkpoint_path(folder, step)
        if (damage := find_damage(path, process)) is None:
            return path
        logger.warning("skipping the damaged checkpoint %s: %s", path, damage)
    return None


def require_complete(path: str, setting: str, process: Process) -> str:
    """`path`, after checking it. Raises `UserError`, naming `setting`, when it is missing or damaged."""
    refuse({f"{setting}: there is no checkpoint {path}": not os.path.isdir(path)})
    damage = find_damage(path, process)
    refuse({f"{setting}: the checkpoint {path} cannot be used: {damage}": damage is not None})
    return path


def model_tensors(model: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Weights and persistent buffers by name, `model.<name>`, tied ones once; copied only where a `dtype` asks it."""
    stored, frozen = (
        stored_tensors(model),
        not all(parameter.requires_grad for parameter in model.parameters()),
    )
    # What is frozen is had again from where it came from.
    tensors = {
        name: one.detach() for name, one in stored.items() if one.requires_grad or not frozen
    }
    if dtype is not None:
        cast = {name for name, one in tensors.items() if one.is_floating_point()}
        cast -= kept_in_float32(model, dtype)
        tensors |= {name: tensors[name].to(dtype) for name in cast}
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def write_checkpoint(
    path: str,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    describe: Callable[[str], None],
    process: Process,
) -> None:
    """Writes `tensors` (sharded ones by their shards) and the small `state` to `path`; all ranks must call it.

    Everything goes to a hidden folder beside it, is checksummed, and only then renamed, so that a
    folder named `step-N` is always complete. `describe(folder)` adds the model's configuration and
    tokenizer. Raises `RunError` on all ranks when the disk refuses.
    """
    folder, name = os.path.split(path)
    unfinished = os.path.join(folder, f".unfinished-{name}")
    try:
        on_first(process, lambda: shutil.rmtree(unfinished, ignore_errors=True))
        dcp.save(tensors, storage_writer=_Writer(unfinished), process_group=process.control)
        own = {file.name: _checksum(file) for file in Path(unfinished).glob(f"__{process.rank}_*")}
        manifest = {
            name: checksum
            for part in gather_objects(process, own)
            for name, checksum in part.items()
        }
        on_first(process, lambda: _complete_checkpoint(path, unfinished, state, describe, manifest))
    except (
        Exception,
        CheckpointException,
    ) as error:  # of the disk, whatever type the libraries give it
        if of_other_ranks(error):
            raise
        if process.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        reason = first_failure(error) if isinstance(error, CheckpointException) else error
        if of_a_worker(reason):
            raise reason from error
        raise RunError(
            f"cannot write the checkpoint {path}: {reason}. Earlier checkpoints are intact; the same command goes on "
            f"from the newest of them."
        ) from error


def first_failure(error: CheckpointException) -> BaseException:
    """What went wrong on one rank, which torch wraps in the tracebacks of all."""
    return next(iter(error.failures.values()))[0]


class _Writer(dcp.FileSystemWriter):
    """Raises what the system said: torch's own error, which follows from it, is about a position in a file."""

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
    """Adds state, description and manifest, which has the checksums of tensors, then gives the folder its name."""
    torch.save(state, os.path.join(unfinished, STATE))
    describe(os.path.join(unfinished, DESCRIPTION))
    files = {
        str(file.relative_to(unfinished)): file
        for file in Path(unfinished).rglob("*")
        if file.is_file()
    }
    manifest |= {name: _checksum(file) for name, file in files.items() if name not in manifest}
    Path(unfinished, MANIFEST).write_text(json.dumps(manifest))
    sync_all(unfinished)
    if os.path.isdir(path):  # a damaged one that was skipped, or the same step saved again
        remove_checkpoint(path)
    os.replace(unfinished, path)
    sync(os.path.dirname(path))


def remove_checkpoint(path: str) -> None:
    """Deletes a checkpoint; it loses its name first, so that a kill in between cannot leave half of it."""
    hidden = os.path.join(os.path.dirname(path), f".removed-{os.path.basename(path)}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


class CheckpointSaver:
    """Writes the checkpoints of one run. At most one is being written at a time; errors surface at the next call."""

    def __init__(
        self, config: Config, folder: str, describe: Callable[[str], None], process: Process
    ) -> None:
        self.settings = config.checkpoint
        self.folder = folder
        self.describe = describe
        # Saves may run behind the training, whose own talk must not mix with theirs.
        self.process = replace(process, control=process.background)
        self.last_time = time.monotonic()
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], wait: bool = False
    ) -> None:
        """Writes `tensors` and `state` as the checkpoint of `step`; all ranks must call it.

        With an async mode it returns once the tensors are copied, unless `wait`.
        """
        self.wait()
        self.last_time = time.monotonic()
        if self.settings.async_mode == "disabled" or wait:
            return self._write(step, tensors, state)
        # Copied without waiting, tensors go to page-locked memory, which torch keeps for the next
        # time.
        pinned = self.settings.async_mode == "async_with_pinned_mem"
        copies = {
            name: tensor.to("cpu", non_blocking=pinned, copy=True)
            for name, tensor in tensors.items()
        }
        if pinned:
            torch.cuda.synchronize()
        self._written = self._thread.submit(self._write, step, copies, state)

    def wait(self) -> None:
        """Waits for the checkpoint being written, if any, and raises what went wrong with it."""
        if self._written is not None:
            self._written.result()

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        started = time.monotonic()
        write_checkpoint(
            checkpoint_path(self.folder, step), tensors, state, self.describe, self.process
        )
        on_first(self.process, lambda: self._remove_old(step, state))
        logger.info("saved step-%d in %.1f s", step, time.monotonic() - started)

    def _remove_old(self, newest: int, state: dict[str, Any]) -> None:
        best = state["counters"]["best_step"] if self.settings.keep_best else None
        if state.get(
            "skipped_in_a_row"
        ):  # its weights may be what cannot be trained further: those before must stay
            return
        # step-0 is a start that somebody made on purpose.
        steps = [
            step for step in listed_steps(self.folder) if step not in (0, best) and step <= newest
        ]
        for step in steps[: -self.settings.keep_latest_k or 0]:
            remove_checkpoint(checkpoint_path(self.folder, step))


def read_tensors(path: str, tensors: dict[str, Tensor], process: Process) -> None:
    """Fills `tensors` in place from the checkpoint at `path`, whatever layout wrote it.

    Raises `UserError` when it holds other tensors (the model's configuration is another one), or
    more than tensors.
    """
    with only_data(f"checkpoint {path}: {METADATA}"):
        saved = Reader(path).read_metadata().state_dict_metadata
    known = {name for held in gather_objects(process, [*tensors]) for name in held}
    lost = min(
        (name for name in saved if name.startswith("model.") and name not in known), default=None
    )
    refuse(
        {
            f"checkpoint {path}: {lost!r} is not among what is trained: give the settings it had": lost
            is not None
        }
    )
    for name, tensor in tensors.items():
        shape = tuple(saved[name].size) if name in saved else None
        found = "is missing" if shape is None else f"has the shape {shape}"
        wrong = f"checkpoint {path}: {name!r} {found}, in the model it has the shape {tuple(tensor.shape)}"
        refuse(
            {f"{wrong}: it belongs to another model configuration": shape != tuple(tensor.shape)}
        )
    try:
        dcp.load(tensors, storage_reader=Reader(path), process_group=process.control)
    except CheckpointException as error:
        with only_data(f"checkpoint {path}: a file of tensors"):
            raise first_failure(error) from error
