"""What all sections share: the strict frozen base class, the kinds of values, and how values are read and shown."""

import json
import os
import pathlib
from contextlib import suppress
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeFloat,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

# The recipes and model configurations that ship with the package.
RECIPES = pathlib.Path(__file__).parent.parent / "recipes"
FLAME_FILE = os.path.join("flame", "models", "fla.toml")  # as flame's commands name it


class Section(BaseModel):
    """One table of the TOML file; its docstring and those of its settings are the help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Words(tuple[str, ...]):
    """The words after a flag; unlike the elements of a TOML list, each may hold several values."""


def _listed(value: Any) -> Any:
    """A comma-separated string, or words, as a tuple; a list as it is."""
    if isinstance(value, Words):
        value = value[0] if len(value) == 1 else ",".join(word.strip(",") for word in value)
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    return value


def also(**spellings: str) -> BeforeValidator:
    """Values that a setting is given as elsewhere, each with ours; upper and lower case are the same."""
    return BeforeValidator(lambda value: spellings.get(str(value).lower(), value))


def packaged(name: str) -> str:
    """The path of the file `name` of the recipes, where there is no such file here; else `name` itself."""
    if os.path.exists(name):
        return name
    recipe = os.path.basename(name) if os.path.normpath(name) == FLAME_FILE else name
    return str(RECIPES / recipe) if recipe in os.listdir(RECIPES) else name


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("should be a path")
    return os.path.expanduser(text)


Path = Annotated[str, AfterValidator(_path)]
Names = Annotated[tuple[str, ...], Strict(False), BeforeValidator(_listed)]
Paths = Annotated[
    tuple[Annotated[str, AfterValidator(lambda text: text and _path(text))], ...],
    Strict(False),
    BeforeValidator(_listed),
]
Shares = Annotated[
    tuple[Annotated[NonNegativeFloat, Strict(False)], ...], Strict(False), BeforeValidator(_listed)
]
Texts = Annotated[
    tuple[str, ...],
    Strict(False),
    BeforeValidator(lambda one: (one,) if isinstance(one, str) else one),
]


def read_value(field: FieldInfo, given: Any) -> Any:
    """The value that a setting gets from TOML, or from the `Words` after a flag; None means its default.

    No word at all is true. Raises ValidationError for a wrong value, ValueError for too many or too
    few words.
    """
    reader = TypeAdapter(field.rebuild_annotation(), config=Section.model_config)
    if given == Words(("none",)) and "none" not in get_args(field.annotation):
        return None
    if not isinstance(given, Words) or (given and isinstance(field.default, tuple)):
        return reader.validate_python(given)
    if len(given) > 1:
        raise ValueError(
            f"takes one value (got {' '.join(given)}); the TOML file goes before all flags"
        )
    if given:
        return reader.validate_strings(given[0])
    with suppress(ValidationError):
        return reader.validate_python(True)
    raise ValueError("needs a value")


def shown(value: Any) -> str:
    """A value as TOML writes it; the word none for none."""
    return (
        "none"
        if value is None
        else json.dumps(value, default=str, ensure_ascii=False).replace("\x7f", "\\u007f")
    )
