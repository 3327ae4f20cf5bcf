"""What a chat template writes between two answers of a model: the messages that it is given."""

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from lacuna.config.errors import UserError
from lacuna.data.messages import REASONING
from lacuna.data.template import Chat, end_of_answer, parting, render, template_for

_QUESTION = {"role": "user", "content": "Is it raining?"}
_ANSWER = "Let me see."
_THOUGHT = "I do not know."
_SAID = "It is dry."

Messages = list[dict[str, Any]]


def opening(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None, where: str
) -> Chat:
    """A short conversation before its first answer, as those that `where` is about begin.

    Raises `UserError` where the tokenizer has no template, or none that ends an answer by a token.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{where}: the tokenizer has no chat template, by which replies could be written: set "
            "chat.template."
        )
    template = template_for(tokenizer, tools or None, where)
    end = end_of_answer(tokenizer, template)
    if end.token is None:
        raise UserError(
            f"{where}: the chat template ends an answer by {end.text!r}, which is no special token "
            "of the tokenizer: name one in model.new_tokens, or set chat.template."
        )
    return Chat(where, tokenizer, template, [_QUESTION], tools or None)


def end_token(chat: Chat) -> int:
    """The token by which the template of a conversation ends an answer."""
    token = end_of_answer(chat.tokenizer, chat.template).token
    assert token is not None, "opening has refused such a template"
    return token


def given_tokens(chat: Chat, reply: Messages) -> list[int]:
    """The tokens from the end of an answer to where the next begins, where a `reply` is between.

    They are those of the template's text behind a special token, which no token spans: so they are
    the same behind whatever the answer was. Raises `UserError` where the template rewrites what was
    before, or refuses the reply.
    """
    roles = tuple(str(message["role"]) for message in reply)
    require_kept(chat.tokenizer, chat.template, json.dumps(chat.tools), roles, chat.where)
    answered = replace(chat, messages=[*chat.messages, stand_in(chat, reply)])
    before = until_end(answered)
    text = _continued(before, replace(answered, messages=answered.messages + reply), 2)
    end = end_token(chat)
    closing = str(chat.tokenizer.convert_ids_to_tokens(end))
    # Behind the token itself, as tokenizers may begin a text with a blank.
    found: list[int] = chat.tokenizer(
        closing + text[len(before) :], add_special_tokens=False, verbose=False
    ).input_ids
    return found[found.index(end) + 1 :]


def stand_in(chat: Chat, reply: Messages) -> dict[str, Any]:
    """An answer that could stand before a reply: it calls the tools whose results are in it."""
    answer: dict[str, Any] = {"role": "assistant", "content": _ANSWER}
    key = _key_of_reasoning(chat.tokenizer, chat.template)
    if key is not None:
        answer[key] = _THOUGHT
    calls = [
        {"id": message.get("tool_call_id", "call00000"), "type": "function"}
        | {"function": {"name": message.get("name", "look"), "arguments": {}}}
        for message in reply
        if message["role"] == "tool"
    ]
    return answer | {"tool_calls": calls} if calls else answer


@lru_cache
def _key_of_reasoning(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """The key of messages under which a template looks for reasoning; None where it writes none.

    It writes none either where it begins an answer as one without reasoning.
    """
    asked = render(Chat("chat.template", tokenizer, template, [_QUESTION]), asks=True)[0]
    for key in REASONING:
        answer = {"role": "assistant", "content": _ANSWER, key: _THOUGHT}
        text = render(Chat("chat.template", tokenizer, template, [_QUESTION, answer]))[0]
        if _THOUGHT in text and text.startswith(asked):
            return key
    return None


@lru_cache
def require_kept(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    tools: str,
    roles: tuple[str, ...],
    where: str,
) -> None:
    """Raises `UserError` unless a template leaves a conversation as it was when it goes on.

    That is tried on two replies of messages with these roles, after answers with reasoning where
    the template writes that. `tools` are JSON text.
    """
    chat = Chat(where, tokenizer, template, [_QUESTION], json.loads(tools))
    reply: Messages = [{"role": role, "content": _SAID} for role in roles]
    name = chat.tools[0]["function"]["name"] if chat.tools else "look"
    for message in reply:
        if message["role"] == "tool":
            message |= {"name": name, "tool_call_id": "call00000"}
    answer = stand_in(chat, reply)
    text = render(chat, asks=True)[0]
    written = set()
    for _ in range(2):
        chat = replace(chat, messages=[*chat.messages, answer])
        text = _continued(text, chat, len(chat.messages) - 1, asks=False)
        chat = replace(chat, messages=chat.messages + reply)
        before = text
        text = _continued(text, chat, len(chat.messages) - len(reply))
        written.add(text[len(before) :])
    if len(written) > 1 or _SAID not in text[len(before) :]:
        raise UserError(
            f"{where}: the chat template does not write messages of {' and '.join(roles)} alike "
            "wherever they are, or leaves them out: set chat.template."
        )


def until_end(answered: Chat) -> str:
    """The text of a conversation up to the token that ends its last message, an answer.

    Raises `UserError` where that token is not there.
    """
    end = end_of_answer(answered.tokenizer, answered.template)
    text = render(answered)[0].removesuffix(end.beyond)
    last = str(answered.tokenizer.convert_ids_to_tokens(end_token(answered)))
    before, found, _ = text.rpartition(last)
    asked = render(replace(answered, messages=answered.messages[:-1]), asks=True)[0]
    if not found or len(before) < len(asked):
        raise UserError(
            f"{answered.where}: the chat template does not end every answer by {last}: set "
            "chat.template."
        )
    return before + found


def _continued(before: str, chat: Chat, stop: int, asks: bool = True) -> str:
    """The text of a conversation, which must begin with the text `before` of messages until `stop`.

    It ends where an answer begins if it `asks`, or else with the end of one. Raises `UserError`
    where the template rewrites that text.
    """
    text = render(chat, asks=True)[0] if asks else until_end(chat)
    if not text.startswith(before):
        raise UserError(
            f"{chat.where}: what a model has said stays as it is, but the chat template rewrites "
            f"it: {parting(chat, stop, not asks)}; give a template that does not, such as "
            'chat.template = "chatml".'
        )
    return text
