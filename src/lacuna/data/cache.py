"""Files that are made once, whoever asks, and kept with the caches of `datasets`; and checksums."""

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
from filelock import FileLock

from lacuna.config import explained, logger
from lacuna.data.disk import sync, sync_all

_BLOCK = 2**20
_READ_OF_DATA = 256 * 2**20


def fingerprint(files: Sequence[str | Path], most: int = _READ_OF_DATA) -> str:
    """What tells files by what is in them, whatever their names and dates.

    Files that have more than `most` bytes together are not read whole, but their sizes and one
    block of 2^20 bytes out of every so many, spread evenly, and the last of each file.
    """
    sizes = [os.path.getsize(file) for file in files]
    stride = _BLOCK * max(1, -(-sum(sizes) // most))
    checksum = zlib.crc32(repr(sizes).encode())
    for path, size in zip(files, sizes, strict=True):
        with open(path, "rb") as file:
            for start in [*range(0, size, stride), max(0, size - _BLOCK)]:
                file.seek(start)
                checksum = zlib.crc32(file.read(_BLOCK), checksum)
    return f"{sum(sizes)}-{checksum:08x}"


def require_writable_cache() -> None:
    """Raises `UserError` when the folder of `datasets`' caches cannot be written to."""
    folder = str(datasets.config.HF_DATASETS_CACHE)
    wrong = f"the cache of data and tokens, {folder}, cannot be written to"
    with explained(
        wrong, OSError, mend="set the environment's HF_DATASETS_CACHE to a folder that can be"
    ):
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def made_once(name: str, write: Callable[[str], Any]) -> Path:
    """The file or folder of this name in the cache, which `write` writes unless it is there.

    Of many processes that ask at once, one writes and the others wait. It gets its name once the
    disk has all of it, and its checksums are kept beside it: what is found damaged later is written
    anew.
    """
    kept = Path(datasets.config.HF_DATASETS_CACHE, "lacuna", name)
    require_writable_cache()
    kept.parent.mkdir(parents=True, exist_ok=True)
    if (damage := _damage(kept)) is None:
        return kept
    if kept.exists():
        logger.warning("the cache %s is damaged (%s): it is made anew", kept, damage)
    with FileLock(f"{kept}.lock"):
        if _damage(kept) is not None:
            new = kept.with_name(f"new-{name}")
            for old in (kept, new):
                _remove(old)
            write(str(new))
            sums = {str(file.relative_to(new)): fingerprint([file], 2**62) for file in _files(new)}
            listed = kept.with_name(f"new-{name}.sums")
            listed.write_text(json.dumps(sums))
            sync(listed)
            sync_all(new)
            listed.replace(_sums_of(kept))
            new.replace(kept)
            sync(kept.parent)
    return kept


def _sums_of(kept: Path) -> Path:
    return kept.with_name(f"{kept.name}.sums")


def _files(kept: Path) -> list[Path]:
    return sorted(file for file in kept.rglob("*") if file.is_file()) if kept.is_dir() else [kept]


def _damage(kept: Path) -> str | None:
    """What is wrong with an entry of the cache, or None."""
    try:
        sums = json.loads(_sums_of(kept).read_text())
        found = {
            str(file.relative_to(kept)): _checksum(file, os.stat(file).st_mtime_ns)
            for file in _files(kept)
        }
    except FileNotFoundError as error:
        return f"{os.path.basename(error.filename)} is missing"
    except ValueError:
        return "its list of checksums is not whole"
    differing = sorted(name for name in sums | found if sums.get(name) != found.get(name))
    return f"not as it was written: {', '.join(differing)}" if differing else None


@lru_cache
def _checksum(file: Path, _changed: int) -> str:
    """Of a whole file; read once in a process, which asks for some entries again and again."""
    return fingerprint([file], 2**62)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
