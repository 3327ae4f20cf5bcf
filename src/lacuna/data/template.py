"""Chat templates: rendered, asked whether they write all of a conversation, and how they end an answer."""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product, takewhile
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from lacuna.config.errors import UserError, explained, refuse
from lacuna.data.messages import REASONING, unknown_roles
from lacuna.data.remote_code import bounded_memory

_MARK = re.compile("Zq[0-9]+qZ")
_MARKED = re.compile(r"\{%[-+]?\s*generation\b")
_TAG = re.compile(r"(</?[a-z_|]+>|\[/?[A-Z_]+\])")
_ENDLESS = (
    "chat.template: with a short question and answer, the chat template",
    "mend it, or give another",
)
_LAST = "No, it is sunny."
_QUESTION = {"role": "user", "content": "Is it raining?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks out.",
        "parameters": {"type": "object", "properties": {}},
    },
}
# What some templates cannot do without: reasoning in a field of its own, or within the answer.
_ANSWERS = (
    {"content": _LAST},
    {"content": _LAST, "reasoning_content": "I look out."},
    {"content": f"<think>\nI look out.\n</think>\n\n{_LAST}"},
)


@dataclass(frozen=True)
class Chat:
    """A conversation and what renders it; `where` it is from begins what is said against it."""

    where: str
    tokenizer: PreTrainedTokenizerBase
    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class End:
    """How a template closes an answer: the text up to the last special token of the turn, which is `token`.

    `beyond` is what it writes after that behind the last message. Without a token `text` is all
    that it writes.
    """

    token: int | None
    text: str
    beyond: str = ""


def template_for(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None, where: str
) -> str:
    """The template for a conversation, of which a tokenizer may have one for tools and one for all else."""
    mend = "give the template that fits by chat.template, as a file"
    with explained(f"{where}: no chat template of the tokenizer is for it", ValueError, mend=mend):
        return tokenizer.get_chat_template(tools=tools)


def templates_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """All chat templates of a tokenizer."""
    templates = tokenizer.chat_template or {}
    return list(templates.values()) if isinstance(templates, dict) else [templates]


def trials(tokenizer: PreTrainedTokenizerBase, template: str) -> Iterator[Chat]:
    """Short conversations, of which a template that is any good fits one: plain, with reasoning, with tools."""
    for tools, answer in product((None, [_TOOL]), _ANSWERS):
        messages = [_QUESTION, {"role": "assistant"} | answer]
        yield Chat("chat.template, tried on a question", tokenizer, template, messages, tools)


def ask(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    """The text after which the answer to a conversation is to come, by the tokenizer's template."""
    where = "the conversation"
    return render(
        Chat(where, tokenizer, template_for(tokenizer, None, where), messages), asks=True
    )[0]


def require_questions(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError where a tokenizer's template fails on a short question, or takes memory without end."""
    with bounded_memory(*_ENDLESS):
        ask(tokenizer, [_QUESTION])


@lru_cache
@bounded_memory(*_ENDLESS)
def end_of_answer(tokenizer: PreTrainedTokenizerBase, template: str) -> End:
    """What a template writes to close an answer. Raises UserError when it refuses every trial."""
    refusal = None
    for chat in trials(tokenizer, template):
        try:
            text = render(replace(chat, where="chat.template"))[0]
        except UserError as error:
            refusal = refusal or error
            continue
        refuse(
            {
                f"chat.template: it makes {len(text):,} characters of a short question and answer": len(
                    text
                )
                > 10**6
            }
        )
        after, between = text.rpartition(_LAST)[2], ""
        with suppress(
            UserError
        ):  # a template may refuse a second question; then the first answer ends all there is
            between = render(replace(chat, messages=chat.messages * 2))[0].partition(_LAST)[2]
        return _end_in(tokenizer, text, after, commonprefix((after, between)))
    raise refusal


def _end_in(tokenizer: PreTrainedTokenizerBase, text: str, after: str, common: str) -> End:
    """The end of an answer where `after` follows it in the end, and `common` there and before another question."""
    special = {
        str(token): number
        for number, token in tokenizer.added_tokens_decoder.items()
        if str(token).strip()
    }
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
    begins = next((token for token in pattern.findall(text) if token != tokenizer.bos_token), None)
    closing = list(takewhile(lambda found: found[0] != begins, pattern.finditer(common)))
    closing = closing or list(pattern.finditer(after))[:1]
    if not closing:
        return End(None, after.strip())
    return End(special[closing[-1][0]], after[: closing[-1].end()], after[closing[-1].end() :])


def render(
    chat: Chat, stop: int | None = None, asks: bool = False
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text of the messages before `stop`, which may ask for an answer, and the characters that it marks if any."""
    problem, mend = (
        f"{chat.where}: the chat template refuses it",
        "mend it or chat.template" + _advice_on_roles(chat),
    )
    with explained(problem, TemplateError, TypeError, ValueError, OverflowError, mend=mend):
        texts, marked = render_jinja_template(
            [chat.messages[:stop]],
            chat.tools,
            chat_template=chat.template,
            add_generation_prompt=asks,
            return_assistant_tokens_mask=bool(_MARKED.search(chat.template)),
            **chat.tokenizer.special_tokens_map,
        )
    return texts[0], marked[0] if marked else None


def _advice_on_roles(chat: Chat) -> str:
    unknown = unknown_roles(chat.messages)
    return (
        f", or say by chat.roles what {unknown} are, such as user={unknown.partition(',')[0]}"
        if unknown
        else ""
    )


def written(chat: Chat, trained: Collection[int]) -> Chat:
    """The conversation with the arguments of calls as its template takes them: tables, or JSON where it joins texts.

    Of the messages that are `trained` it must write everything, of others the content and the
    calls. Raises UserError with what it leaves out.
    """
    given = {"tool_calls": _called(chat), "tools": chat.tools}
    unknown = " and ".join(name for name in given if given[name] and name not in chat.template)
    refuse(
        {
            f"{chat.where}: the chat template does not write {unknown}; set chat.template": unknown
            != ""
        }
    )
    marked, parts = _marked(chat, trained)
    arguments = [function["arguments"] for function in _called(marked)]
    try:
        text = render(marked)[0]
        joins = any(str(table) in text for table in arguments if table)
    except UserError as error:
        if not arguments or not isinstance(error.__cause__, TypeError):
            raise
        joins = True
    if joins:
        for function in _called(chat) + _called(marked):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        text = render(marked)[0]
    there = set(_MARK.findall(text))
    lost = " and ".join(dict.fromkeys(part for mark, part in parts.items() if mark not in there))
    thoughts = len(trained) > 1 and any(name in lost for name in REASONING)
    mend = (
        "set chat.template"
        + (', or chat.train_on = "last"' if thoughts else "")
        + _advice_on_roles(chat)
    )
    refuse({f"{chat.where}: the chat template does not write {lost}; {mend}": lost != ""})
    return chat


def _called(chat: Chat) -> list[dict[str, Any]]:
    return [call["function"] for message in chat.messages for call in message.get("tool_calls", ())]


def _marked(chat: Chat, trained: Collection[int]) -> tuple[Chat, dict[str, str]]:
    """A copy of a conversation whose every part ends in a mark of its own, and which part each mark is of.

    Names, which a template may look up, have one only where nothing else of a call or a tool has.
    """
    parts: dict[str, str] = {}
    marked = replace(chat, messages=deepcopy(chat.messages), tools=deepcopy(chat.tools))
    for number, message in enumerate(marked.messages):
        whose, content = f"of message {number + 1}", message.get("content", "")
        pieces = _TAG.split(content) if number in trained else [content]
        pieces = [
            piece if _TAG.fullmatch(piece) else _mark(piece, f"content {whose}", parts)
            for piece in pieces
        ]
        message |= {"content": "".join(pieces)} if content else {}
        thoughts = {
            message[key]: f"{key} {whose}"
            for key in REASONING
            if number in trained and key in message
        }
        thoughts = {thought: _mark(thought, name, parts) for thought, name in thoughts.items()}
        message |= {
            key: thoughts[message[key]] for key in REASONING if message.get(key) in thoughts
        }
        for call in message.get("tool_calls", ()):
            function, before = call["function"], len(parts)
            function["arguments"] = _mark(function["arguments"], f"tool_calls {whose}", parts)
            if len(parts) == before:
                function["name"] = _mark(function["name"], f"tool_calls {whose}", parts)
    for tool in marked.tools or ():
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        function["name"] = _mark(function.get("name"), "tools", parts)
    return marked, parts


def _mark(value: Any, part: str, parts: dict[str, str]) -> Any:
    """A value whose every text ends in a mark, each of which joins the `parts`."""
    if isinstance(value, dict):
        return {key: _mark(inner, part, parts) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mark(inner, part, parts) for inner in value]
    if not isinstance(value, str) or not value.strip():
        return value
    parts[f"Zq{len(parts)}qZ"] = part
    return value + [*parts][-1]


def parting(chat: Chat, stop: int, asks: bool) -> str:
    """Which lines of the template write where a conversation and its messages before `stop` part, and what."""
    environment = _compile_jinja_template(chat.template).environment
    tree = environment.parse(chat.template)
    for output in tree.find_all(nodes.Output):
        output.nodes = [
            part
            for node in output.nodes
            for part in (nodes.TemplateData(f"\0{node.lineno}\0"), node)
        ]
    template, texts, lines = environment.from_string(tree), [], []
    for messages, adding in ((chat.messages, False), (chat.messages[:stop], asks)):
        variables = {"messages": messages, "tools": chat.tools, "add_generation_prompt": adding}
        pieces = re.split(
            "\0([0-9]+)\0", template.render(**variables, **chat.tokenizer.special_tokens_map)
        )
        texts.append("".join(pieces[2::2]))
        lines.append(
            [line for line, piece in zip(pieces[1::2], pieces[2::2], strict=True) for _ in piece]
        )
    at = len(commonprefix(texts))
    whole, part = (
        f"line {line[at]} writes {text[max(at - 8, 0) : at + 24]!r}"
        if text[at:]
        else "nothing is written"
        for text, line in zip(texts, lines, strict=True)
    )
    return f"{whole} in the whole conversation, but {part} {'where it is asked for' if asks else 'where it is last'}"
