"""Settings for the eye: the help of every flag, and a configuration as TOML."""

import textwrap
from typing import Any

from pydantic import BaseModel

from lacuna.config.sections import Config
from lacuna.config.values import to_toml_value, type_name


def help_text(width: int = 100) -> str:
    """Every flag with its type, default and description as plain text, a group per section."""
    lines = ["Settings, in the TOML file or as flags; the word none gives a setting its default."]
    for section, info in Config.model_fields.items():
        table = info.annotation
        lines += ["", f"[{section}]  {table.__doc__}"]
        for name, field in table.model_fields.items():
            default = "" if field.default in (None, ()) else f" (default: {to_toml_value(field.default)})"
            lines.append(f"  --{section}.{name} {type_name(field.annotation)}")
            lines += textwrap.wrap(
                f"{field.description}{default}", width, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    lines += ["", "The names that flame and torchtitan use (training.dataset, experimental.*, ...) work too."]
    return "\n".join(lines)


def to_toml(config: Config) -> str:
    """Every setting as TOML that `load_config` reads back to an equal configuration."""
    lines = []
    for section in type(config).model_fields:
        lines.append(f"[{section}]")
        table = getattr(config, section)
        nested = []
        for name in type(table).model_fields:
            value = getattr(table, name)
            if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
                nested.append((name, value))
            else:
                lines.append(_assignment(name, value))
        for name, entries in nested:
            for entry in entries:
                lines += ["", f"[[{section}.{name}]]"]
                lines += [_assignment(field, getattr(entry, field)) for field in type(entry).model_fields]
        lines.append("")
    return "\n".join(lines)


def _assignment(name: str, value: Any) -> str:
    return f"# {name} is not set" if value is None else f"{name} = {to_toml_value(value)}"
