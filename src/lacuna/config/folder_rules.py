"""Names of folders inside a run's that would take the place of others."""

import os
from functools import partial
from itertools import combinations

from lacuna.config.rules import Rule
from lacuna.config.sections import Config

_FOLDERS = (
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)


def _folder(setting: str, config: Config) -> str:
    """A folder inside the run's, in its simplest form."""
    section, name = setting.split(".")
    return os.path.normpath(str(getattr(getattr(config, section), name)))


def _is_taken(setting: str, config: Config) -> bool:
    """Whether a folder is the run's own, or that of the model at its end, which replaces it."""
    return _folder(setting, config).split(os.sep)[0] in (".", "hf")


def _is_one(first: str, second: str, config: Config) -> bool:
    return _folder(first, config) == _folder(second, config)


FOLDER_RULES: tuple[Rule, ...] = (
    *(
        Rule(
            (setting,),
            partial(_is_taken, setting),
            "it cannot be the run folder itself, nor hf, which the model replaces at the end; "
            "choose another name",
        )
        for setting in _FOLDERS
    ),
    *(
        Rule(pair, partial(_is_one, *pair), "each needs a folder of its own; rename one")
        for pair in combinations(_FOLDERS, 2)
    ),
)
