"""Reads checkpoints without running anything in their files, wherever they come from."""

import enum
import os
import pathlib
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load
from torch.serialization import get_unsafe_globals_in_checkpoint

from lacuna.config import UserError
from lacuna.formats.checkpoint import METADATA, STATE
from lacuna.formats.writer import first_failure
from lacuna.parallel.processes import Process, gather_objects

NEEDLESS = "which no weights need"


def _member(kind: Any, name: str) -> enum.Enum:
    """A member of an enumeration, which Python before 3.11.4 has looked up by getattr."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"it names builtins.getattr, {NEEDLESS}")
    return kind[name]


# All that torch names in the metadata of a checkpoint of tensors, beside dtypes.
_PLAIN: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        kinds.Metadata,
        kinds.TensorStorageMetadata,
        kinds.TensorProperties,
        kinds.ChunkStorageMetadata,
        kinds.MetadataIndex,
        kinds.StorageMeta,
        kinds._MEM_FORMAT_ENCODING,
        _StorageInfo,
        pathlib.PosixPath,
    )
} | {
    ("torch", "Size"): torch.Size,
    ("builtins", "getattr"): _member,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,  # as other versions of Python call it
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
}


@contextmanager
def damage_explained(
    what: str, errors: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """A context in which these errors become a `UserError` that says why `what` cannot be used.

    By default any error does: a file that is damaged, or made to do harm, may fail in any way.
    """
    try:
        yield
    except errors as error:
        mend = "it is damaged or not what it should be, and nothing in it was run"
        raise UserError(f"{what} cannot be used: {why_not_read(error)}; {mend}.") from error


def why_not_read(error: BaseException) -> str:
    """Why a file was not read: what it asked for that no tensor needs, or what the error says.

    Only the error's first line is told: further lines are torch's advice to run the file's content.
    """
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named:
            return f"it names {named[1]}, {NEEDLESS}"
    return " ".join(str(error).partition("\n")[0].rstrip(".").split())


class _PlainUnpickler(pickle.Unpickler):
    """Reads pickles of the classes that describe tensors, and refuses all else.

    A pickle can name any function and have it run.
    """

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, {NEEDLESS}")
        return _PLAIN[module, name]


class Reader(FileSystemReader):
    """torch's reader of checkpoints, except that reading the metadata cannot run anything."""

    def read_metadata(self, *_: Any, **__: Any) -> kinds.Metadata:
        with open(os.path.join(self.path, METADATA), "rb") as file:
            found: kinds.Metadata = _PlainUnpickler(file).load()
        tensors = found.state_dict_metadata.values()
        if not all(isinstance(tensor, kinds.TensorStorageMetadata) for tensor in tensors):
            raise ValueError("it describes something other than tensors")
        files = [info.relative_path for info in found.storage_data.values()]
        outside = [file for file in files if Path(file).name != file]
        if outside:
            raise ValueError(f"it names a file of another folder, {outside[0]}")
        found.storage_meta = kinds.StorageMeta(load_id=self.load_id)
        return found


def read_state(path: str) -> dict[str, Any]:
    """The small state of the checkpoint at `path`: of the loop, the source and the objective.

    A checkpoint of weights alone has only that of the loop, with a step.
    """
    file = os.path.join(path, STATE)
    with damage_explained(f"checkpoint {path}: {STATE}"):
        if unsafe := get_unsafe_globals_in_checkpoint(file):
            raise ValueError(f"it names {unsafe[0]}, {NEEDLESS}")
        state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        return state if "loop" in state else _from_before_version_0_2(state)


def _from_before_version_0_2(state: dict[str, Any]) -> dict[str, Any]:
    """The parts of a state that was written before version 0.2, when states had no parts."""
    loop = {name: value for name, value in state.items() if name not in ("data", "objective")}
    counters = loop.get("counters", {})
    if "stage" in counters:
        counters["curriculum_stage"] = counters.pop("stage")
    parts = {"loop": loop, "objective": state.get("objective", {})}
    return parts | {"source": state["data"]} if "data" in state else parts


def read_tensors(path: str, tensors: dict[str, Tensor], process: Process, owner: str = "") -> None:
    """Fills `tensors` in place from the checkpoint at `path`, whatever layout wrote it.

    Their names begin with `owner` and then "model." or "optimizer.". Raises `UserError` when it
    holds others that begin so (the model or the optimizer is another one), or more than tensors.
    """
    with damage_explained(f"checkpoint {path}: {METADATA}"):
        saved = Reader(path).read_metadata().state_dict_metadata
    parts = (f"{owner}model.", f"{owner}optimizer.")
    for name, tensor in tensors.items():
        found = _found_instead(saved.get(name), tensor)
        if found is not None:
            kind = "optimizer ([optimizer])" if name.startswith(parts[1]) else "model configuration"
            raise UserError(
                f"checkpoint {path}: {name!r} {found}, in the model it has the shape "
                f"{tuple(tensor.shape)} and the dtype {str(tensor.dtype)[6:]}: it belongs to "
                f"another {kind}; give the settings it had."
            )
    known = {name for held in gather_objects(process, [*tensors]) for name in held}
    asked = tuple(part for part in parts if any(name.startswith(part) for name in known))
    unknown = sorted(name for name in saved if name.startswith(asked) and name not in known)
    if unknown:
        raise UserError(
            f"checkpoint {path}: {unknown[0]!r} is not among what is trained, or what the "
            "optimizer keeps of it: give the settings it had."
        )
    try:
        load(tensors, storage_reader=Reader(path), process_group=process.control)
    except CheckpointException as error:
        with damage_explained(f"checkpoint {path}: a file of tensors"):
            raise first_failure(error) from error


def _found_instead(there: object, tensor: Tensor) -> str | None:
    """What a checkpoint has for a tensor that cannot be filled with it; None where it can be.

    Floats of any dtype fill each other, but codes of 8 bits are no numbers.
    """
    if not isinstance(there, kinds.TensorStorageMetadata):
        return "is missing"
    if there.size != tensor.shape:
        return f"has the shape {tuple(there.size)}"
    dtype = there.properties.dtype
    same = dtype.is_floating_point == tensor.is_floating_point()
    return None if same else f"has the dtype {str(dtype)[6:]}"
