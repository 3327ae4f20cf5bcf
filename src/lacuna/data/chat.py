"""Conversations to tokens and which of them are trained: what knows roles, chat templates and the ends of turns."""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from lacuna.config.documents import COLUMNS, ChatConfig
from lacuna.config.errors import UserError, explained, nearby, refuse
from lacuna.config.fields import RECIPES
from lacuna.data.tokenizer import tokenize_text

# Our names of the columns that each needs.
_FORMATS = (("messages",), ("prompt", "completion"), ("text",))

_KINDS: dict[type, str] = {str: "text", list: "a list", dict: "a table"}
_SHAREGPT = {role: role for role in ("system", "user", "assistant", "tool")}
_SHAREGPT |= {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_TRIAL = [{"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": "No, it is sunny."}]

_MARKED = re.compile(r"\{%[-+]?\s*generation\b")
# A template that joins the arguments of a call to a text wants them as JSON, others want them as tables.
_JOINS_ARGUMENTS = re.compile(r"arguments['\"]?\]?\s*[+~]")


@dataclass(frozen=True)
class _Chat:
    """A conversation and what renders it; `where` it is from begins what is said against it."""

    where: str
    tokenizer: PreTrainedTokenizerBase
    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def use_template(tokenizer: PreTrainedTokenizerBase, settings: ChatConfig) -> None:
    """Give a tokenizer, which has all its tokens by now, the chat template of the settings, if they name one.

    Raises UserError when it has none in the end, or one from which a model could not learn to end its turn.
    """
    if settings.template is not None:
        packaged = RECIPES / "templates" / f"{settings.template}.jinja"
        file = packaged if packaged.is_file() else Path(settings.template)
        problem = f"chat.template: give chatml, llama3 or a file (got {settings.template})"
        mend = "write it in UTF-8" if file.is_file() else nearby(file)
        with explained(problem, OSError, ValueError, mend=mend):
            tokenizer.chat_template = file.read_text(encoding="utf-8")
    slow = "model.tokenizer_path: conversations need a fast tokenizer, which tells the place of each token"
    absent = "chat.template: the tokenizer has none of its own; give chatml, llama3 or a file"
    refuse({slow: not tokenizer.is_fast, absent: not tokenizer.chat_template})
    trial = _Chat("chat.template, tried on a question", tokenizer, tokenizer.get_chat_template(), _TRIAL)
    end, after = _end_of_answer(tokenizer, trial.template)
    wrong = f"chat.template: after an answer there is {after!r}; this must begin with one special token"
    marks = "of the tokenizer, within the {% generation %} marks where there are any, for a model to learn to stop"
    mend = "name the token in model.new_tokens, or give another template"
    refuse({f"{wrong} {marks}; {mend}": end is None or end not in _encode_chat(trial, 0, settings)})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens at which an answer ends: the end of text, and what the chat template puts after an answer."""
    ends = [tokenizer.eos_token_id]
    with suppress(UserError, ValueError):  # a template that nobody trains on may refuse the trial, or be one of several
        ends.append(_end_of_answer(tokenizer, tokenizer.get_chat_template())[0])
    return [end for end in dict.fromkeys(ends) if end is not None]


@lru_cache
def _end_of_answer(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[int | None, str]:
    """What a template puts after an answer: its first token if that is a special one, else None; and the text."""
    text = _render(_Chat("chat.template", tokenizer, template, _TRIAL))[0]
    after = text.rpartition(_TRIAL[-1]["content"])[2].strip()
    first = [*tokenizer.encode(after, add_special_tokens=False), None][0]
    return (first if first in tokenizer.added_tokens_decoder else None), after


def conversation_columns(columns: Collection[str], settings: ChatConfig) -> tuple[tuple[str, ...], dict[str, str]]:
    """Our names of the columns that conversations are read from, and our name -> the data's of all that there are.

    A format that `chat.columns` names goes first. Raises UserError when there are no such columns.
    """
    renamed = dict(pair.split("=", 1) for pair in settings.columns)
    names = {ours: ours for ours in COLUMNS} | {"messages": "messages" if "messages" in columns else "conversations"}
    found = {ours: theirs for ours, theirs in (names | renamed).items() if theirs in columns}
    for needed in sorted(_FORMATS, key=renamed.keys().isdisjoint):
        if found.keys() >= {*needed, *renamed}:
            return needed, found
    wanted = ", ".join(settings.columns) or "messages (or conversations), prompt and completion, or text"
    mend = "say by chat.columns which hold conversations, such as messages=dialog or prompt=question,completion=answer"
    raise UserError(f"no columns {wanted}, but {', '.join(columns)}; {mend}")


def encode(record: dict[str, Any], place: str, tokenizer: PreTrainedTokenizerBase, settings: ChatConfig) -> np.ndarray:
    """The tokens of a row, int32 [tokens], those that are not trained as their bitwise complement (below 0).

    `use_template` has prepared the tokenizer. Raises UserError that tells the place, the column and what is wrong
    there when the row does not fit, also when nothing of it would be trained.
    """
    needed, found = conversation_columns(record, settings)
    values = {ours: record[found[ours]] for ours in needed}
    where = f"{place}, column {' and '.join(found[ours] for ours in needed)}"
    if "text" in values:
        tokens = tokenize_text(tokenizer, _read(values["text"], str, where))
    elif isinstance(values.get("prompt"), str):
        tokens = _encode_pair(values["prompt"], _read(values["completion"], str, where), tokenizer)
    else:
        parts = [_messages(value, where) for value in values.values()]
        tools = _read(record.get(found.get("tools")) or [], list, f"{place}, column {found.get('tools')}")
        tools = [_without_none(_read(tool, dict, f"{place}, column {found['tools']}")) for tool in tools] or None
        chat = _Chat(where, tokenizer, tokenizer.get_chat_template(tools=tools), sum(parts, []), tools)
        tokens = _encode_chat(chat, len(chat.messages) - len(parts[-1]), settings)
    if not (tokens[1:] >= 0).any():
        raise UserError(f"{where}: no token would be trained; leave the row out, or mend chat.template")
    return tokens


def _encode_pair(prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """A prompt as a model is given it, and what it is to answer, which ends the text; no token is of both."""
    asked, answer = tokenize_text(tokenizer, prompt), tokenize_text(tokenizer, completion, begins=False)
    ends = tokenizer.eos_token_id is not None and not prompt.endswith(tokenizer.eos_token)
    return np.concatenate([~(asked[:-1] if ends else asked), answer])


def _encode_chat(chat: _Chat, first: int, settings: ChatConfig) -> np.ndarray:
    """As `encode`, where answers from message `first` on are trained."""
    answers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    turns = [turn for turn in answers if turn >= first][-1 if settings.train_on == "last" else 0 :]
    calls = [call["function"] for message in chat.messages for call in message.get("tool_calls", ())]
    given = {"tool_calls": calls, "tools": chat.tools}
    unwritten = " and ".join(name for name in given if given[name] and name not in chat.template)
    lacking = "no message is the assistant's" if chat.messages else "the conversation is empty"
    refuse({f"{chat.where}: {lacking}; leave the row out": not turns})
    refuse({f"{chat.where}: the chat template does not write {unwritten}; set chat.template": unwritten != ""})
    if _JOINS_ARGUMENTS.search(chat.template):
        for function in calls:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    text, spans = _render(chat)
    if spans is None:
        spans = [_answer(chat, text, turn, turn < turns[-1]) for turn in reversed(turns)]
    elif turns[0] > answers[0]:
        spans = spans[len(_render(chat, turns[0])[1]) :]
    encoding = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = np.array(encoding["input_ids"], dtype=np.int32)
    starts, stops = np.array(encoding["offset_mapping"]).reshape(-1, 2).T
    trained, ends = np.zeros(len(tokens), dtype=bool), end_of_turn(chat.tokenizer)
    for first_character, beyond in spans:
        start, stop = np.searchsorted(stops, first_character, side="right"), np.searchsorted(starts, beyond)
        end_follows = stop < len(tokens) and tokens[stop] in ends and tokens[stop - 1] not in ends
        trained[start : stop + end_follows] = True
    return np.where(trained, tokens, ~tokens)


def _answer(chat: _Chat, whole: str, turn: int, is_earlier: bool) -> tuple[int, int]:
    """The characters of `whole` that answer: from where message `turn` is asked for to its end-of-turn token.

    Raises UserError unless `whole` begins with the conversation before the message, and with that up to its end.
    """
    end = chat.tokenizer.convert_ids_to_tokens(_end_of_answer(chat.tokenizer, chat.template)[0])
    asked = _render(chat, turn, asks=True)[0]
    answered = whole if turn + 1 == len(chat.messages) else _render(chat, turn + 1)[0]
    ended = answered.rfind(end, len(asked))
    answered = answered[: ended + len(end)] if ended >= 0 else answered.rstrip()
    for beginning, stop, asks in ((asked, turn, True), (answered, turn + 1, False)):
        if not whole.startswith(beginning):
            last = ', or set chat.train_on = "last"' if is_earlier else ""
            wrong = "where it begins and ends cannot be told, because the chat template rewrites"
            mend = f'give a template with {{% generation %}} marks, such as chat.template = "chatml"{last}'
            raise UserError(f"{chat.where}, message {turn + 1}: {wrong}: {_parting(chat, stop, asks)}; {mend}")
    return len(asked), len(answered)


def _render(chat: _Chat, stop: int | None = None, asks: bool = False) -> tuple[str, list[tuple[int, int]] | None]:
    """The text of the messages before `stop`, which may ask for an answer, and the characters that it marks if any."""
    problem = f"{chat.where}: the chat template refuses it"
    with explained(problem, TemplateError, TypeError, mend="mend it or chat.template"):
        texts, marked = render_jinja_template(
            [chat.messages[:stop]], chat.tools, chat_template=chat.template, add_generation_prompt=asks,
            return_assistant_tokens_mask=bool(_MARKED.search(chat.template)), **chat.tokenizer.special_tokens_map,
        )  # fmt: skip
    return texts[0], marked[0] if marked else None


def _parting(chat: _Chat, stop: int, asks: bool) -> str:
    """Which lines of the template write where a conversation and its messages before `stop` part, and what."""
    environment = _compile_jinja_template(chat.template).environment
    tree = environment.parse(chat.template)
    for output in tree.find_all(nodes.Output):
        output.nodes = [part for node in output.nodes for part in (nodes.TemplateData(f"\0{node.lineno}\0"), node)]
    template, texts, lines = environment.from_string(tree), [], []
    for messages, adding in ((chat.messages, False), (chat.messages[:stop], asks)):
        variables = {"messages": messages, "tools": chat.tools, "add_generation_prompt": adding}
        pieces = re.split("\0([0-9]+)\0", template.render(**variables, **chat.tokenizer.special_tokens_map))
        texts.append("".join(pieces[2::2]))
        lines.append([line for line, piece in zip(pieces[1::2], pieces[2::2], strict=True) for _ in piece])
    at = len(commonprefix(texts))
    whole, part = (
        f"line {line[at]} writes {text[max(at - 8, 0) : at + 24]!r}" if text[at:] else "nothing is written"
        for text, line in zip(texts, lines, strict=True)
    )
    return f"{whole} in the whole conversation, but {part} {'where it is asked for' if asks else 'where it is last'}"


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of messages with transformers' keys."""
    return [_message(one, f"{where}, message {number}") for number, one in enumerate(_read(value, list, where), 1)]


def _message(value: Any, where: str) -> dict[str, Any]:
    message = _without_none(_read(value, dict, where))
    if "from" in message and "role" not in message:
        speaker, content = message.pop("from"), message.pop("value", None)
        refuse({f"{where}: is from {speaker!r}; known are {', '.join(_SHAREGPT)}": speaker not in _SHAREGPT})
        called = {"tool_calls": [content]} if speaker == "function_call" else {"content": content}
        message |= {"role": _SHAREGPT[speaker]} | called
    _read(message.get("role"), str, f"{where}, role")
    if calls := _read(message.get("tool_calls", []), list, f"{where}, tool_calls"):
        message["tool_calls"] = [_call(_read(call, dict, f"{where}, tool_calls"), where) for call in calls]
    _read(message.get("content", "" if calls else None), str, f"{where}, content")
    return message


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call of a tool with transformers' keys."""
    function = _read(call.get("function", call), dict, f"{where}, function")
    _read(function.get("name"), str, f"{where}, name of the function")
    arguments = _read(function.get("arguments", {}), dict, f"{where}, arguments of {function['name']}")
    return {"type": "function"} | call | {"function": function | {"arguments": arguments}}


def _read(value: Any, kind: type, where: str) -> Any:
    """A value that must be text, or a list or table, which may come as JSON."""
    if kind is not str and isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, kind):
        raise UserError(f"{where}: should be {_KINDS[kind]}, not {value!r:.60}")
    return value


def _without_none(value: Any) -> Any:
    """Without the keys that Arrow gives to all rows because some have them."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
