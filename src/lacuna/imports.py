"""Makes importing the libraries short: bytecode is kept, and what no run uses is left out."""

import gc
import importlib.util
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LARGEST = ("torch", "transformers", "datasets")
"""The libraries whose source takes longest to compile."""

LAST = "lacuna.train.session"
"""What imports everything that a run needs."""

UNUSED_SECONDS = 30 * 86400.0


def keep_bytecode() -> None:
    """Has Python keep bytecode in the user's cache folder where it would keep none.

    It keeps none where `PYTHONDONTWRITEBYTECODE` is set, as in many containers, and where the
    libraries lie in a folder that cannot be written to. Every start then compiles their source
    again. Nothing is changed where the libraries have bytecode already, where
    `PYTHONPYCACHEPREFIX` is set, or with Python's option -B. The processes that this one starts
    do as it does.
    """
    asked = "PYTHONDONTWRITEBYTECODE" in os.environ
    if sys.pycache_prefix is not None or (sys.dont_write_bytecode and not asked):
        return
    sources = [*_sources_without_bytecode()]
    if not sources or (not asked and all(os.access(one.parent, os.W_OK) for one in sources)):
        return
    caches = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    folder = Path(caches, "lacuna", "bytecode", _fingerprint(sources))
    if not _is_ours(folder):
        return
    _remove_unused(folder)
    sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _sources_without_bytecode() -> Iterator[Path]:
    """The first file of each of the largest libraries that has no bytecode beside it."""
    for name in LARGEST:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            continue
        if not os.path.exists(importlib.util.cache_from_source(found.origin)):
            yield Path(found.origin)


def _fingerprint(sources: list[Path]) -> str:
    """A name for the packages that are installed beside these, of which each has its version.

    Python tells stale bytecode by the time and size of its source. That fails where all files of an
    image are given the same time, so other versions have another folder.
    """
    folders = sorted({source.parent.parent for source in sources})
    names = [f"{folder}/{name}" for folder in folders for name in sorted(os.listdir(folder))]
    return f"{zlib.crc32(' '.join(names).encode()):08x}"


def _is_ours(folder: Path) -> bool:
    """Whether this user alone can write to the folder, which is made if it is not there.

    What lies in it is run, so that nobody else may have put it there.
    """
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(folder)
        status = folder.stat()
        return status.st_uid == os.getuid() and not status.st_mode & 0o022
    return False


def _remove_unused(folder: Path) -> None:
    """Removes the folders beside this one from which no run has started for a month."""
    for other in folder.parent.iterdir():
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(other)


@contextmanager
def without_collections() -> Iterator[None]:
    """Keeps Python from looking for garbage while modules are imported.

    They make hundreds of thousands of objects that stay, so that it would look through them again
    and again. It never looks at them afterwards either.
    """
    if LAST in sys.modules:  # nothing is left to import, and what there is may become garbage
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_unused_libraries() -> Iterator[None]:
    """Lets transformers find neither scikit-learn nor torchao while its modules are imported.

    Where they are installed it imports them for what no run uses: drafts by a smaller model, and
    weights in torchao's formats. lacuna's float8 imports torchao itself.
    """
    from transformers import utils

    names = ("is_sklearn_available", "is_torchao_available")
    kept = {name: getattr(utils, name) for name in names}
    for name in names:
        setattr(utils, name, lambda *_, **__: False)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(utils, name, function)
