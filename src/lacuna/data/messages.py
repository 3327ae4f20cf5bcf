"""Rows to messages with transformers' keys: the columns and the spellings of conversations."""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from datasets import Json

from lacuna.config.conversations import COLUMNS, ChatConfig
from lacuna.config.errors import UserError, logger
from lacuna.data.files import of_json

REASONING = ("reasoning_content", "reasoning", "thinking")
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")

# For each way to write conversations, our names of the columns that it needs.
_CONVERSATIONS = (("messages",), ("prompt", "completion"), ("instruction", "output"), ("text",))

_HISTORY = "history"  # what Alpaca's columns have of earlier turns
VARIABLES = "chat_template_kwargs"  # TRL's
# What a chat template is given of the conversation itself, or of how it is written.
_OF_CHAT = {
    "messages",
    "tools",
    "documents",
    "conversations",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}

_KINDS: dict[type, str] = {str: "text", list: "a list", dict: "a table"}
_SHAREGPT = {role: role for role in ("system", "user", "assistant", "tool")}
_SHAREGPT |= {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


def conversation_columns(
    columns: Collection[str], settings: ChatConfig, where: str = ""
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Our names of the columns that hold conversations; and our name -> the data's, of all found.

    A format that `chat.columns` names goes first. Raises UserError, which begins with `where`, when
    there are no such columns.
    """
    found = columns_by_our_names(columns, settings)
    needed = fitting_format(_CONVERSATIONS, found, settings)
    if needed is None:
        usual = (
            "messages (or conversations), prompt and completion, instruction and output, or text"
        )
        raise UserError(
            f"{where}no columns {', '.join(settings.columns) or usual}, but {', '.join(columns)}; "
            "say by chat.columns which hold conversations, such as messages=dialog or "
            "prompt=question,completion=answer"
        )
    return needed, found


def columns_by_our_names(columns: Collection[str], settings: ChatConfig) -> dict[str, str]:
    """Our name -> the data's, of all the columns that are there and have a meaning."""
    names = {ours: ours for ours in (*COLUMNS, _HISTORY, VARIABLES)}
    if "messages" not in columns:
        names["messages"] = "conversations"
    if "system" not in columns:
        names["system"] = "system_prompt"
    names |= _renamed_columns(settings)
    return {ours: theirs for ours, theirs in names.items() if theirs in columns}


def fitting_format(
    formats: Sequence[tuple[str, ...]], found: Collection[str], settings: ChatConfig
) -> tuple[str, ...] | None:
    """The first format whose columns are all found; those that `chat.columns` names come first."""
    renamed = _renamed_columns(settings)
    for needed in sorted(formats, key=renamed.keys().isdisjoint):
        if {*needed, *renamed} <= {*found}:
            return needed
    return None


def _renamed_columns(settings: ChatConfig) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in settings.columns)


def unfilled(value: Any, features: Any, name: str) -> Any:
    """A value without the nulls that its table holds only because other rows have a key.

    `features` is the type that the table has for the value. Warns once where arguments of calls
    hold nulls: those that the data meant look the same.
    """
    if isinstance(features, Json):  # kept as it was written
        return value
    if isinstance(value, list):
        return [unfilled(part, getattr(features, "feature", None), name) for part in value]
    if not isinstance(value, dict):
        return value
    parts = features if isinstance(features, dict) else {}
    arguments = value.get("arguments") if "name" in value else None
    if (
        isinstance(arguments, dict)
        and None in arguments.values()
        and not isinstance(parts.get("arguments"), Json)
    ):
        _warn_of_nulls(name)
    return {
        key: unfilled(part, parts.get(key), name) for key, part in value.items() if part is not None
    }


@lru_cache
def _warn_of_nulls(name: str) -> None:
    logger.warning(
        "%s: null arguments of tool calls are left out, as its tables hold null also for what a "
        "call has not; arguments as JSON text, or records as JSON lines, keep them",
        name,
    )


def instructed(values: dict[str, Any], more: Any, where: str) -> list[list[dict[str, Any]]]:
    """The question and the answer of Alpaca's columns; `more` is its input, which may be empty."""
    asked = [read(values["instruction"], str, where), read(more or "", str, where)]
    question = {"role": "user", "content": "\n\n".join(filter(None, asked))}
    answer = {"role": "assistant", "content": read(values["output"], str, where)}
    return [[question], [answer]]


def read_messages(value: Any, where: str, settings: ChatConfig) -> list[dict[str, Any]]:
    """Messages with transformers' keys. Raises UserError when the value is no list of messages."""
    pairs = [pair.split("=", 1) for pair in settings.roles]
    roles = {theirs: ours for ours, theirs in pairs}
    return [
        _read_message(one, f"{where}, message {number}", roles)
        for number, one in enumerate(read(value, list, where), 1)
    ]


def read_tools(
    record: dict[str, Any], found: dict[str, str], place: str
) -> list[dict[str, Any]] | None:
    """The tools of a row, in the column that is `found` for them; None where it has none."""
    column = f"{place}, column {found.get('tools')}"
    tools = read(record.get(found.get("tools", "")) or [], list, column)
    return [read(tool, dict, column) for tool in tools] or None


def read_variables(record: dict[str, Any], place: str) -> dict[str, Any]:
    """What a row gives its chat template beside the conversation, by the template's names."""
    where = f"{place}, column {VARIABLES}"
    given: dict[str, Any] = read(record.get(VARIABLES) or {}, dict, where)
    if taken := given.keys() & _OF_CHAT:
        raise UserError(f"{where}: {min(taken)} is given by the conversation; leave it out there")
    return given


def is_trained(message: dict[str, Any], where: str) -> bool:
    """Whether an answer may be trained: OpenAI's and axolotl's data say so of each message.

    Raises UserError where they say something else.
    """
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise UserError(f"{where}, weight: should be 0 or 1, not {weight!r:.60}")
    marks = {key: message.get(key, True) for key in ("train", "training")}
    for key, mark in marks.items():
        if not isinstance(mark, bool):
            raise UserError(f"{where}, {key}: should be true or false, not {mark!r:.60}")
    return weight == 1 and all(marks.values())


def read_system(record: dict[str, Any], found: dict[str, str], place: str) -> str:
    """The system prompt of a row, in the column that is `found` for it; empty where it has none.

    Raises UserError where the row has earlier turns in a column of their own, which is not read.
    """
    if record.get(found.get(_HISTORY, "")) not in (None, "", "[]", []):
        raise UserError(
            f"{place}, column {_HISTORY}: earlier turns are not read from a column of their own; "
            "give all turns as messages, or leave the column out"
        )
    told = record.get(found.get("system", ""))
    return told if isinstance(told, str) and told.strip() else ""


def behind_system(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """The messages behind a system prompt, unless it is empty or they begin with one."""
    if not system or (messages and messages[0]["role"] in ("system", "developer")):
        return messages
    return [{"role": "system", "content": system}, *messages]


def refuse_system(system: str, found: dict[str, str], place: str) -> None:
    """Raises UserError where a prompt that is text has a system prompt in another column."""
    if system:
        raise UserError(
            f"{place}, column {found['system']}: a prompt that is text has no place for a system "
            "prompt; write it into the prompt, give the prompt as messages, or leave the column out"
        )


def unknown_roles(messages: list[dict[str, Any]]) -> str:
    """The roles of messages that few chat templates know, as a list with commas."""
    roles = dict.fromkeys(message["role"] for message in messages)
    return ", ".join(role for role in roles if role not in KNOWN_ROLES)


def _read_message(value: Any, where: str, roles: dict[str, str]) -> dict[str, Any]:
    """A message with transformers' keys; `roles` are ours by the data's."""
    message = {key: part for key, part in read(value, dict, where).items() if part is not None}
    if "from" in message and "role" not in message:
        message = _of_sharegpt(message, where, roles)
    role = read(message.get("role"), str, f"{where}, role")
    message["role"] = roles.get(role, role)
    calls = read(message.pop("tool_calls", []), list, f"{where}, tool_calls")
    if calls:
        message["tool_calls"] = [
            _read_call(read(call, dict, f"{where}, tool_calls"), where) for call in calls
        ]
    if isinstance(message.get("content"), list):
        message["content"] = _text_of_parts(message["content"], f"{where}, content")
    read(message.get("content", "" if calls else None), str, f"{where}, content")
    for key in REASONING:
        read(message.get(key, ""), str, f"{where}, {key}")
    return message


def _text_of_parts(parts: list[Any], where: str) -> str:
    """The text of a message that is written in parts, as OpenAI's data have it, of which it is one.

    Raises UserError for other parts, and for several: programs differ in what they put between.
    """
    kinds = [read(part, dict, where).get("type") for part in parts]
    if kinds != ["text"]:
        raise UserError(
            f"{where}: of parts there may be one, a text, not "
            f"{', '.join(map(str, kinds)) or 'none'}; write the message as one text"
        )
    text: str = read(parts[0].get("text"), str, f"{where}, text")
    return text


def _of_sharegpt(message: dict[str, Any], where: str, roles: dict[str, str]) -> dict[str, Any]:
    """A message of ShareGPT's with the keys that other messages have."""
    rest = {key: part for key, part in message.items() if key not in ("from", "value")}
    speaker = read(message["from"], str, f"{where}, from")
    content = message.get("value")
    known = _SHAREGPT | roles
    if speaker not in known:
        raise UserError(
            f"{where}: is from {speaker!r}; known are {', '.join(known)}; name others by "
            f"chat.roles, such as user={speaker}."
        )
    if speaker == "function_call":
        return rest | {"role": known[speaker], "tool_calls": [content]}
    return rest | {"role": known[speaker], "content": content}


def _read_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call of a tool with transformers' keys."""
    function = read(call.get("function") or call, dict, f"{where}, function")
    name = read(function.get("name"), str, f"{where}, name of the function")
    given = function.get("arguments")
    arguments = {}
    if given is not None:
        arguments = read(given, dict, f"{where}, arguments of {name}")
    return {"type": "function"} | call | {"function": function | {"arguments": arguments}}


def read(value: Any, kind: type, where: str) -> Any:
    """The value, which must be of this kind; a list or a table may also come as JSON text."""
    if kind is not str and isinstance(value, str):
        with suppress(json.JSONDecodeError):
            value = of_json(value.encode())
    if not isinstance(value, kind):
        raise UserError(f"{where}: should be {_KINDS[kind]}, not {value!r:.60}")
    return value
