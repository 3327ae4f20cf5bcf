"""Functions that a model may call: its calls are read, made, and answered by what is returned."""

import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lacuna.config import UserError
from lacuna.data.marks import fitted_to_template
from lacuna.data.replies import Messages, end_token, require_kept, until_end
from lacuna.data.template import Chat, render


def require_tools(chat: Chat) -> None:
    """Raises `UserError` unless the template of a conversation writes tools, calls and results.

    The calls that it writes must be read as they were meant.
    """
    assert chat.tools is not None
    call = {"name": chat.tools[0]["function"]["name"], "arguments": {"place": 'a "blue" house'}}
    messages = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id(0), "type": "function", "function": dict(call)}],
        },
        {"role": "tool", "content": "It is dry.", "name": call["name"], "tool_call_id": call_id(0)},
    ]
    fitted_to_template(replace(chat, messages=[*chat.messages, *messages]), [1])
    require_kept(chat.tokenizer, chat.template, json.dumps(chat.tools), ("tool",), chat.where)
    written = until_end(replace(chat, messages=[*chat.messages, messages[0]]))
    end = str(chat.tokenizer.convert_ids_to_tokens(end_token(chat)))
    said = written.removesuffix(end)[len(render(chat, asks=True)[0]) :]
    found = calls_in(said, chat)
    if found != [call]:
        raise UserError(
            f"rollout.tools: the call {json.dumps(call)}, as the chat template writes it, is read "
            f"as {json.dumps(found)}: give the tokenizer a response_template, or read calls in a "
            "rollout.environment."
        )


def calls_in(text: str, chat: Chat) -> list[dict[str, Any]]:
    """The calls of tools in a turn that the model has ended: the name and arguments of each.

    They are read by the tokenizer's response_template. Without one they are the JSON objects behind
    the reasoning that have a name and arguments (or parameters, as Llama calls them). What cannot
    be read is no call.
    """
    if getattr(chat.tokenizer, "response_template", None) is None:
        return [*_json_calls(text.rpartition("</think>")[2])]
    asked = render(chat, asks=True)[0]
    text += str(chat.tokenizer.convert_ids_to_tokens(end_token(chat)))
    tools: list[Any] = chat.tools or []
    try:
        message = chat.tokenizer.parse_response(text, prefix=asked, tools=tools)
    except (ValueError, TypeError, LookupError, AttributeError):  # it is cut off, or is no call
        return []
    calls = [call for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    functions = [call.get("function", call) for call in calls]
    found = [call for call in map(_call_of, functions) if call is not None]
    return found if len(found) == len(message.get("tool_calls") or []) else []


def _call_of(said: Any) -> dict[str, Any] | None:
    """The name and the arguments of a call, where it has both as they should be."""
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments") or {}
    return {"name": said["name"], "arguments": arguments} if isinstance(arguments, dict) else None


def _json_calls(text: str) -> Iterator[dict[str, Any]]:
    """The objects in a text that are calls, in their order."""
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        stop = start + 1
        with suppress(ValueError, RecursionError):
            value, end = decoder.raw_decode(text, start)
            arguments = value.get("arguments", value.get("parameters"))
            if isinstance(value.get("name"), str) and isinstance(arguments, dict):
                yield {"name": value["name"], "arguments": arguments}
                stop = end
        start = text.find("{", stop)


def call_id(number: int) -> str:
    """The id of a call among those of a turn; some templates take none but of nine letters."""
    return f"call{number:05}"


class ToolCalls:
    """The environment that calls the functions of `rollout.tools`, as the model asks for them.

    It is over with the first turn without a call. A call that fails is answered by its error.

    Attributes:
        tool_errors: the number of calls that failed.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        chat: Chat,
        row: dict[str, Any],
        seed: int,
    ) -> None:
        self.functions = functions
        self.chat = chat
        self.tool_errors = 0

    def reply(self, text: str) -> Messages | Awaitable[Messages] | None:
        """The results of the calls in a turn of the model; None where it has none."""
        calls = calls_in(text, self.chat)
        if not calls:
            return None
        results = [self._result(**call) for call in calls]
        if any(inspect.isawaitable(result) for result in results):
            return self._awaited(calls, results)
        return self._messages(calls, results)

    def _result(self, name: str, arguments: dict[str, Any]) -> Any:
        """What a function returns, or the error that it raises."""
        if name not in self.functions:
            return LookupError(f"there is no {name}, but {', '.join(self.functions)}")
        try:
            return self.functions[name](**arguments)
        except Exception as error:  # whatever the user's own lines raise
            return error

    async def _awaited(self, calls: Sequence[dict[str, Any]], results: Sequence[Any]) -> Messages:
        found = []
        for result in results:
            try:
                found.append(await result if inspect.isawaitable(result) else result)
            except Exception as error:  # whatever the user's own lines raise
                found.append(error)
        return self._messages(calls, found)

    def _messages(self, calls: Sequence[dict[str, Any]], results: Sequence[Any]) -> Messages:
        self.tool_errors += sum(isinstance(result, Exception) for result in results)
        return [
            {"role": "tool", "name": _encodable(call["name"]), "tool_call_id": call_id(number)}
            | {"content": _encodable(_content(result))}
            for number, (call, result) in enumerate(zip(calls, results, strict=True))
        ]


def _encodable(text: str) -> str:
    """The text with ? for halves of pairs of surrogates, which JSON may hold and UTF-8 may not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _content(result: Any) -> str:
    """What a function returned as a text: texts as they are, all else as JSON."""
    if isinstance(result, Exception):
        return f"Error: {type(result).__name__}: {result}"
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)
