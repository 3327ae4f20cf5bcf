"""Every setting of a run: read from TOML and flags once, checked, and frozen."""

from lacuna.config.errors import RunError, UserError, explained, logger, of_stage, refuse
from lacuna.config.parse import load_config, to_toml
from lacuna.config.sections import Config

__all__ = ["Config", "RunError", "UserError", "explained", "load_config", "logger", "of_stage", "refuse", "to_toml"]
