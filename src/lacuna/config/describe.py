"""Settings for the eye: the help of every flag, and a configuration as TOML."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from lacuna.config.fields import shown
from lacuna.config.sections import Config

_TYPES = {"boolean": "true|false", "integer": "int", "number": "float", "array": "list", "string": "text"}


def help_text(width: int = 100) -> str:
    """Every flag with its type, default and description as plain text, a group per section."""
    lines = ["Settings, in the TOML file or as flags; the word none is the default, where it is no value itself."]
    for section, info in Config.model_fields.items():
        schema = info.annotation.model_json_schema()
        heading, *texts = re.split(r"\n+(\w+): ", schema["description"])
        about = dict(zip(texts[::2], texts[1::2], strict=True))
        lines += ["", f"[{section}]  {heading}"]
        for name, field in schema["properties"].items():
            default = "" if field.get("default") in (None, []) else f" (default: {shown(field['default'])})"
            kind = field.get("anyOf", [field])[0]
            words = kind.get("enum", [kind.get("const", _TYPES[kind["type"]])])
            lines.append(f"  --{section}.{name} {'|'.join(map(str, words))}")
            lines.append(textwrap.indent(textwrap.fill(re.sub(r"\s+", " ", about[name] + default), width - 6), " " * 6))
    lines += ["", "The names that flame and torchtitan use (training.dataset, experimental.*, ...) work too."]
    return "\n".join(lines)


def to_toml(config: Config) -> str:
    """Every setting as TOML that `load_config` reads back to an equal configuration."""
    sections = config.model_dump().items()
    return "\n".join(line for name, table in sections for line in (f"[{name}]", *_lines(name, table), ""))


def _lines(name: str, table: dict[str, Any]) -> Iterator[str]:
    """The settings of a table, and behind them its lists of tables."""
    lists = {key: value for key, value in table.items() if isinstance(value, tuple) and {*map(type, value)} == {dict}}
    for key, value in table.items():
        if key not in lists:
            yield f"# {key} is not set" if value is None else f"{key} = {shown(value)}"
    for key, tables in lists.items():
        for each in tables:
            yield from ("", f"[[{name}.{key}]]", *_lines(f"{name}.{key}", each))
