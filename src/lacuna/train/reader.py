"""What reads a checkpoint's files without running anything that is in them, wherever they come from."""

import os
import pathlib
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import get_unsafe_globals_in_checkpoint

from lacuna.config import UserError

STATE = "state.pt"
METADATA = ".metadata"
NEEDLESS = "which no weights need"

# All that torch names in the metadata of a checkpoint of tensors, beside dtypes.
_PLAIN = {
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
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,  # as other versions of Python call it
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
}


@contextmanager
def only_data(what: str, errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Within it, these errors, by default any, become a `UserError` that says why `what` cannot be used."""
    try:
        yield
    except errors as error:  # damaged, or made to harm, a file may fail anyhow
        mend = "it is damaged or not what it should be, and nothing in it was run"
        raise UserError(f"{what} cannot be used: {why_not_read(error)}; {mend}.") from error


def why_not_read(error: BaseException) -> str:
    """What a file asked for that no tensor needs, or else what the error says: torch advises to run it."""
    named = (
        re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError)
        else None
    )
    return (
        f"it names {named[1]}, {NEEDLESS}"
        if named
        else " ".join(str(error).partition("\n")[0].rstrip(".").split())
    )


class _PlainUnpickler(pickle.Unpickler):
    """Knows the classes that describe tensors, and nothing else, as pickles can name any function and have it run."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, {NEEDLESS}")
        return _PLAIN[module, name]


class Reader(dcp.FileSystemReader):
    """torch's reader of checkpoints, but that its metadata are only data."""

    def read_metadata(self, *_: Any, **__: Any) -> kinds.Metadata:
        with open(os.path.join(self.path, METADATA), "rb") as file:
            found = _PlainUnpickler(file).load()
        if not all(
            isinstance(tensor, kinds.TensorStorageMetadata)
            for tensor in found.state_dict_metadata.values()
        ):
            raise ValueError("it describes something other than tensors")
        files = [info.relative_path for info in found.storage_data.values()]
        outside = [file for file in files if Path(file).name != file]
        if outside:
            raise ValueError(f"it names a file of another folder, {outside[0]}")
        found.storage_meta = kinds.StorageMeta(load_id=self.load_id)
        return found


def read_state(path: str) -> dict[str, Any]:
    """The small state (step, counters, position in the data) of the checkpoint at `path`."""
    file = os.path.join(path, STATE)
    with only_data(f"checkpoint {path}: {STATE}"):
        if unsafe := get_unsafe_globals_in_checkpoint(file):
            raise ValueError(f"it names {unsafe[0]}, {NEEDLESS}")
        return torch.load(file, weights_only=True, map_location="cpu")
