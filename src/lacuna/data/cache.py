"""Files that are made once, whoever asks for them, and kept with the caches of `datasets`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from filelock import FileLock


def made_once(name: str, write: Callable[[str], Any]) -> Path:
    """The file of this name, which `write` writes unless it is there; of many that ask at once the others wait."""
    file = Path(datasets.config.HF_DATASETS_CACHE, "lacuna", name)
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        if not file.exists():
            new = file.with_name(f"new-{name}")
            write(str(new))
            new.replace(file)
    return file
