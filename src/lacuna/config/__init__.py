"""Every setting of a run: read from TOML and flags once, checked, and frozen."""

from lacuna.config.errors import (
    LAUNCHED,
    STORE,
    OutageError,
    RunError,
    UnansweredError,
    UserError,
    explained,
    in_curriculum_stage,
    logger,
    make_folder,
)
from lacuna.config.parse import load_config, to_toml
from lacuna.config.sections import Config

__all__ = [
    "LAUNCHED",
    "STORE",
    "Config",
    "OutageError",
    "RunError",
    "UnansweredError",
    "UserError",
    "explained",
    "load_config",
    "logger",
    "make_folder",
    "in_curriculum_stage",
    "to_toml",
]
