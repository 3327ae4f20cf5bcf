"""Finds what a chat template leaves out of a conversation, by marks in a copy of it."""

import json
import re
from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from typing import Any

from lacuna.config.errors import UserError
from lacuna.data.messages import REASONING
from lacuna.data.template import Chat, advice_on_roles, render

_MARK = re.compile("Zq[0-9]+qZ")
_TAG = re.compile(r"(</?[a-z_|]+>|\[/?[A-Z_]+\])")


def fitted_to_template(chat: Chat, trained: Collection[int]) -> Chat:
    """The conversation, with the arguments of calls in the form that its template takes.

    That form is a table, or JSON text where the template joins texts. The template must write
    everything in the messages that are `trained`, and the content and the calls of the others.
    Raises UserError that names what it leaves out.
    """
    _require_names(chat)
    marked, parts = _with_marks(chat, trained)
    arguments = [function["arguments"] for function in _called_functions(marked)]
    try:
        text = render(marked)[0]
        joins = any(str(table) in text for table in arguments if table)
    except UserError as error:
        if not arguments or not isinstance(error.__cause__, TypeError):
            raise
        joins = True
    if joins:
        for function in _called_functions(chat) + _called_functions(marked):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        text = render(marked)[0]
    there = set(_MARK.findall(text))
    lost = " and ".join(dict.fromkeys(part for mark, part in parts.items() if mark not in there))
    if lost:
        mend = "set chat.template"
        if len(trained) > 1 and any(name in lost for name in REASONING):
            mend += ', or chat.train_on = "last"'
        raise UserError(
            f"{chat.where}: the chat template does not write {lost}; {mend}{advice_on_roles(chat)}."
        )
    return chat


def _require_names(chat: Chat) -> None:
    """Raises UserError where a conversation has calls or tools that its template never mentions."""
    given = {"tool_calls": _called_functions(chat), "tools": chat.tools}
    unknown = [name for name, value in given.items() if value and name not in chat.template]
    if unknown:
        raise UserError(
            f"{chat.where}: the chat template does not write {' and '.join(unknown)}; "
            "set chat.template."
        )


def _called_functions(chat: Chat) -> list[dict[str, Any]]:
    return [call["function"] for message in chat.messages for call in message.get("tool_calls", ())]


def _with_marks(chat: Chat, trained: Collection[int]) -> tuple[Chat, dict[str, str]]:
    """A copy of a conversation whose every part ends in a mark, and the part that each mark is in.

    A template may look names up: they get a mark only where nothing else in a call or tool has one.
    """
    parts: dict[str, str] = {}
    marked = replace(chat, messages=deepcopy(chat.messages), tools=deepcopy(chat.tools))
    for number, message in enumerate(marked.messages):
        whose = f"of message {number + 1}"
        if content := message.get("content", ""):
            message["content"] = _mark_content(content, number in trained, whose, parts)
        if number in trained:
            _mark_reasoning(message, whose, parts)
        for call in message.get("tool_calls", ()):
            function = call["function"]
            before = len(parts)
            function["arguments"] = _mark_texts(function["arguments"], f"tool_calls {whose}", parts)
            if len(parts) == before:
                function["name"] = _mark_texts(function["name"], f"tool_calls {whose}", parts)
    for tool in marked.tools or ():
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        function["name"] = _mark_texts(function.get("name"), "tools", parts)
    return marked, parts


def _mark_content(content: str, is_trained: bool, whose: str, parts: dict[str, str]) -> str:
    """The content of a message with a mark; in a trained one, also with one before every tag."""
    pieces = _TAG.split(content) if is_trained else [content]
    return "".join(
        piece if _TAG.fullmatch(piece) else _mark_texts(piece, f"content {whose}", parts)
        for piece in pieces
    )


def _mark_reasoning(message: dict[str, Any], whose: str, parts: dict[str, str]) -> None:
    """Marks the reasoning of a message; keys that hold the same get the same mark."""
    names = {message[key]: f"{key} {whose}" for key in REASONING if key in message}
    marked = {thought: _mark_texts(thought, name, parts) for thought, name in names.items()}
    for key in REASONING:
        if message.get(key) in marked:
            message[key] = marked[message[key]]


def _mark_texts(value: Any, part: str, parts: dict[str, str]) -> Any:
    """The value with a mark at the end of every text in it; each mark is added to the `parts`."""
    if isinstance(value, dict):
        return {key: _mark_texts(inner, part, parts) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mark_texts(inner, part, parts) for inner in value]
    if not isinstance(value, str) or not value.strip():
        return value
    parts[f"Zq{len(parts)}qZ"] = part
    return value + [*parts][-1]
