"""What has its name is whole, and on the disk: written beside its place, synced, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: str | Path) -> None:
    """Has the disk hold what was written to a file, or which names a folder has."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(path: str | Path) -> None:
    """Has the disk hold a file, or a folder with everything in it."""
    for place, _, names in os.walk(path, topdown=False):
        for name in names:
            sync(os.path.join(place, name))
        sync(place)
    if os.path.isfile(path):
        sync(path)


@contextmanager
def whole_folder(folder: str) -> Iterator[str]:
    """A folder to write to, which in the end, when the disk has all of it, is named `folder`."""
    unfinished = f"{folder.rstrip(os.sep)}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(unfinished)
    yield unfinished
    sync_all(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    sync(os.path.dirname(os.path.abspath(folder)))


def replace_text(path: Path, text: str) -> None:
    """Gives a file this content, on the disk, at once or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    sync(new)
    new.replace(path)
    sync(path.parent)
