"""Which columns of a source are used."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import islice

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.objectives import PreferenceConfig
from lacuna.data.files import records_of

# Columns that texts are looked for in, unless one is named.
_COLUMNS = ("text", "content", "input_ids")
# How many records are searched for one that has the columns.
_FIRST = 1000


def first_columns(
    paths: list[str], kind: str, columns_of: Callable[[list[str]], list[str]]
) -> list[str]:
    """The columns that are used, by the first record that has them; those before may be broken."""
    known: dict[str, None] = {}
    broken = ""
    for record, place in islice(records_of(paths, kind), _FIRST):
        if isinstance(record, dict):
            known |= dict.fromkeys(record)
            with suppress(UserError):
                return columns_of(list(record))
        else:
            broken = broken or place
    if not known and kind == "text":
        raise UserError(f"{broken}; write it in UTF-8.")
    if not known:
        raise UserError(f"{paths[0]}: holds no JSON objects; give one object with a text per line.")
    return columns_of(list(known))


def used_columns(
    columns: list[str],
    text_column: str | None,
    chat: ChatConfig | None,
    preference: PreferenceConfig | None,
    numbers: Sequence[str],
    whole: bool = False,
) -> list[str]:
    """Those of all `columns` that are used; the first of them holds the texts or tokens.

    With `whole` all are used. Raises `UserError` where one that is asked for is not among them.
    """
    known = ", ".join(columns)
    for name in numbers:
        if name not in columns:
            raise UserError(f"curriculum.difficulty_column: no column {name}; it has {known}.")
    if whole:
        return columns
    if chat is not None:
        _, used = columns_of_rows(columns, chat, preference)
        return [*used.values(), *numbers]
    candidates = (text_column,) if text_column else _COLUMNS
    for name in candidates:
        if name in columns:
            return [name, *numbers]
    raise UserError(
        f"no column {' or '.join(candidates)}; it has {known}; name one by data.text_column."
    )


def columns_of_rows(
    columns: Collection[str], chat: ChatConfig, preference: PreferenceConfig | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Our names of the columns that conversations or preferences are read from, and the data's.

    They have the form that `conversation_columns` returns.
    """
    if preference is None:
        from lacuna.data.messages import conversation_columns  # an extension

        return conversation_columns(columns, chat)
    from lacuna.data.judged import judged_columns  # an extension, which few runs need

    return judged_columns(columns, chat, preference.loss)
