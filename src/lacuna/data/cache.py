"""Files that are made once, whoever asks for them, and kept beside the caches of `datasets`."""

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
    """A text that differs where the contents of files differ, whatever their names and dates.

    Files that have more than `most` bytes together are not read whole: their sizes count, blocks of
    2^20 bytes that are spread evenly over them, and the last block of each file.
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

    Of many processes that ask at once, one writes and the others wait. The entry gets its name once
    the disk has all of it. Its checksums are kept beside it, and an entry that is found damaged
    later is written anew.
    """
    kept = Path(datasets.config.HF_DATASETS_CACHE, "lacuna", name)
    require_writable_cache()
    kept.parent.mkdir(parents=True, exist_ok=True)
    damage = _find_damage(kept)
    if damage is None:
        return kept
    if kept.exists():
        logger.warning("the cache %s is damaged (%s): it is made anew", kept, damage)
    with FileLock(f"{kept}.lock"):
        if _find_damage(kept) is not None:
            new = kept.with_name(f"new-{name}")
            for old in (kept, new):
                _remove_entry(old)
            write(str(new))
            sums = {
                str(file.relative_to(new)): fingerprint([file], 2**62) for file in _files_in(new)
            }
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


def _files_in(kept: Path) -> list[Path]:
    return sorted(file for file in kept.rglob("*") if file.is_file()) if kept.is_dir() else [kept]


def _find_damage(kept: Path) -> str | None:
    """What is wrong with an entry of the cache, or None."""
    try:
        sums = json.loads(_sums_of(kept).read_text())
        found = {
            str(file.relative_to(kept)): _checksum_of(file, os.stat(file).st_mtime_ns)
            for file in _files_in(kept)
        }
    except FileNotFoundError as error:
        return f"{os.path.basename(error.filename)} is missing"
    except ValueError:
        return "its list of checksums is not whole"
    differing = sorted(name for name in sums | found if sums.get(name) != found.get(name))
    return f"not as it was written: {', '.join(differing)}" if differing else None


@lru_cache
def _checksum_of(file: Path, _changed: int) -> str:
    """The checksum of a whole file, computed once in a process, which asks for it often."""
    return fingerprint([file], 2**62)


def _remove_entry(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
