"""Functions of the user's own that a model may call, and how they are described to it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from lacuna.config import UserError, explained
from lacuna.config.user_code import import_attribute
from lacuna.data.sources import Documents


def functions_of(names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The functions of `rollout.tools`, by the names that a model calls them by.

    Raises `UserError` for what cannot be imported or is no function, and for names that are not
    each a function's own.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        if ":" not in name:
            raise UserError(f"rollout.tools: {name}: give it as module:function.")
        with explained(f"rollout.tools: {name}", ValueError, mend="give it as module:function"):
            function = import_attribute(name)
        called = getattr(function, "__name__", None)
        if called is None or not callable(function):
            raise UserError(f"rollout.tools: {name} is no function: give one.")
        if called in found:
            raise UserError(f"rollout.tools: two functions are called {called}: rename one.")
        found[called] = function
    return found


def descriptions_of(names: Sequence[str]) -> list[dict[str, Any]]:
    """What a chat template is given of each function of `rollout.tools`, by transformers' rules.

    Raises `UserError` for a function that does not say what it does and takes.
    """
    described = []
    for name, function in functions_of(names).items():
        problem = f"rollout.tools: {name} does not say what it does and what it takes"
        mend = (
            "give it a docstring that describes it and, under Args:, each argument, and type hints"
        )
        with explained(problem, DocstringParsingException, TypeHintParsingException, mend=mend):
            described.append(get_json_schema(function))
    return described


def with_tools(sources: Sequence[Documents], names: Sequence[str]) -> tuple[Documents, ...]:
    """The sources, whose prompts all begin conversations, and tell of these functions.

    Raises `UserError` where a function cannot be described.
    """
    tools = descriptions_of(names)
    return tuple(replace(source, tools=tools) for source in sources)
