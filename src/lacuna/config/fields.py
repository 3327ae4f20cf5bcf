"""What all sections share: their base class, the kinds of values, and how values are read."""

import json
import os
import pathlib
import tomllib
from contextlib import suppress
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

# The recipes and model configurations that ship with the package.
RECIPES = pathlib.Path(__file__).parent.parent / "recipes"
_COLDEST, _HOTTEST = 0.01, 100.0
# In seconds; what waits takes no numbers that are much larger.
_YEAR = 31_536_000
FLAME_FILE = os.path.join("flame", "models", "fla.toml")  # as flame's commands name it


class Section(BaseModel):
    """One table of the TOML file; its docstring and those of its settings are the help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Words(tuple[str, ...]):
    """The words after a flag; unlike the elements of a TOML list, each may hold several values."""


def _split_list(value: Any) -> Any:
    """A comma-separated string, or the words after a flag, as a tuple; a list stays as it is.

    A string may also be a list as TOML and JSON write it.
    """
    if isinstance(value, Words):
        value = value[0] if len(value) == 1 else ",".join(word.strip(",") for word in value)
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        with suppress(ValueError):
            return tuple(tomllib.loads(f"list = {value}")["list"])
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    return value


def other_spellings(**spellings: str) -> BeforeValidator:
    """Reads other `spellings` of a setting's values, in upper or lower case, as ours."""
    return BeforeValidator(lambda value: spellings.get(str(value).lower(), value))


def packaged(name: str) -> str:
    """The path of the file of this name that ships with lacuna; one in the present folder wins."""
    if os.path.exists(name):
        return name
    recipe = os.path.basename(name) if os.path.normpath(name) == FLAME_FILE else name
    return str(RECIPES / recipe) if recipe in os.listdir(RECIPES) else name


def _checked_path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("should be a path")
    return os.path.expanduser(text)


def is_temperature(number: float) -> bool:
    """Whether logits can be divided by a number, or the likeliest token be taken, which is 0.

    Beyond these bounds they are too far from each other for float32, or too near.
    """
    return number == 0 or _COLDEST <= number <= _HOTTEST


def _checked_temperature(number: float) -> float:
    if not is_temperature(number):
        raise ValueError(f"should be from {_COLDEST:g} to {_HOTTEST:g}, or 0 where that is allowed")
    return number


Path = Annotated[str, AfterValidator(_checked_path)]
Temperature = Annotated[NonNegativeFloat, AfterValidator(_checked_temperature)]
Seconds = Annotated[float, Field(gt=0, le=_YEAR)]
WholeSeconds = Annotated[int, Field(gt=0, le=_YEAR)]
Names = Annotated[tuple[str, ...], Strict(False), BeforeValidator(_split_list)]
Paths = Annotated[
    tuple[Annotated[str, AfterValidator(lambda text: text and _checked_path(text))], ...],
    Strict(False),
    BeforeValidator(_split_list),
]
Shares = Annotated[
    tuple[Annotated[NonNegativeFloat, Strict(False)], ...],
    Strict(False),
    BeforeValidator(_split_list),
]
Texts = Annotated[
    tuple[str, ...],
    Strict(False),
    BeforeValidator(lambda one: (one,) if isinstance(one, str) else one),
]


def read_value(field: FieldInfo, given: Any) -> Any:
    """The value that a setting gets from TOML or from the `Words` after a flag.

    None means the setting's default. A flag without a word means true. Raises `ValidationError` for
    a wrong value, and `ValueError` for too many or too few words.
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
    """A value as TOML writes it, or the word none."""
    if value is None:
        return "none"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # JSON may hold it as it is, TOML may not
