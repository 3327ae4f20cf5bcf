"""Values and types of settings: read from the words of a command line, and written."""

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lacuna.config.fields import Words


def members(annotation: Any) -> tuple[Any, ...]:
    """The types that a setting may have, without None and without bounds."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(m for part in get_args(annotation) if part is not type(None) for m in members(part))
    return (annotation,)


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values that a setting may have where they are listed, else nothing."""
    return tuple(c for kind in members(annotation) if get_origin(kind) is Literal for c in get_args(kind))


def is_list(annotation: Any) -> bool:
    """Whether a setting holds several values."""
    return any(get_origin(kind) is tuple for kind in members(annotation))


def type_name(annotation: Any) -> str:
    """How the help writes the type of a setting."""
    if choices(annotation):
        return "|".join(str(choice) for choice in choices(annotation))
    if is_list(annotation):
        return "list"
    return {bool: "true|false", int: "int", float: "float"}.get(members(annotation)[0], "text")


def from_words(annotation: Any, words: list[str]) -> Any:
    """The value that the words after a flag stand for; a word of the wrong type stays as it is.

    Raises ValueError, with what is wrong, when there are too many or too few words.
    """
    kinds = members(annotation)
    if is_list(annotation) and words:
        return Words(words)
    if bool in kinds and not words:
        return True
    if not words:
        raise ValueError("needs a value")
    if len(words) > 1:
        raise ValueError(f"takes one value (got {' '.join(words)}); the TOML file goes before all flags")
    word = words[0]
    if bool in kinds:
        return {"true": True, "false": False}.get(word.lower(), word)
    for kind in (int, float):
        if kind in kinds or any(type(choice) is kind for choice in choices(annotation)):
            try:
                return kind(word)
            except ValueError:
                continue
    return word


def to_toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(to_toml_value(element) for element in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
