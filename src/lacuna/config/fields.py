"""What all sections share: the strict frozen base class and the kinds of values."""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One table of the TOML file; the text below a field is its help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Words(tuple[str, ...]):
    """The words after a flag; unlike the elements of a TOML list, each may hold several values."""


def _split_commas(value: Any) -> Any:
    """A comma-separated string, or words, as a tuple; a list as a tuple, its elements untouched."""
    if isinstance(value, Words):
        value = value[0] if len(value) == 1 else ",".join(word.strip(",") for word in value)
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    return tuple(value) if isinstance(value, list) else value


def _split_numbers(value: Any) -> Any:
    parts = _split_commas(value)
    if not isinstance(value, str | Words):
        return parts
    try:
        return tuple(float(part) for part in parts)
    except ValueError as error:
        raise ValueError(f"should be numbers separated by commas: {error}") from None


def _one_or_many(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | Words) else value


Path = Annotated[str, AfterValidator(os.path.expanduser)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_split_commas)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_split_numbers)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Tables = BeforeValidator(_one_or_many)
