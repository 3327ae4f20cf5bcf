"""Files that are whole once they have their name: written beside it, synced, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: str | Path) -> None:
    """Makes sure that what was written to a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(path: str | Path) -> None:
    """Makes sure that a file, or a folder with everything in it, is on the disk."""
    for place, _, names in os.walk(path, topdown=False):
        for name in names:
            sync(os.path.join(place, name))
        sync(place)
    if os.path.isfile(path):
        sync(path)


@contextmanager
def whole_folder(folder: str) -> Iterator[str]:
    """A folder to write to; once all of it is on the disk at the end, it is named `folder`."""
    unfinished = f"{folder.rstrip(os.sep)}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(unfinished)
    yield unfinished
    sync_all(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    sync(os.path.dirname(os.path.abspath(folder)))


def replace_text(path: Path, text: str) -> None:
    """Gives a file this content on the disk; a crash leaves the old content or the new, whole."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    sync(new)
    new.replace(path)
    sync(path.parent)
