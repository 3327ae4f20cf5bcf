"""Renders chat templates, and finds out how they end an answer."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from functools import lru_cache
from itertools import product, takewhile
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from lacuna.config.errors import UserError, explained
from lacuna.data.messages import unknown_roles
from lacuna.data.remote_code import bounded_memory

_MARKED = re.compile(r"\{%[-+]?\s*generation\b")
_DAY = "strftime_now"  # what transformers calls the function that tells templates the time
_ENDLESS = (
    "chat.template: with a short question and answer, the chat template",
    "mend it, or give another",
)
_LAST = "No, it is sunny."
_LONGEST_TRIAL = 10**6
_QUESTION = {"role": "user", "content": "Is it raining?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks out.",
        "parameters": {"type": "object", "properties": {}},
    },
}
# Some templates need an answer to have reasoning, in a field of its own or within the answer.
_ANSWERS = (
    {"content": _LAST},
    {"content": _LAST, "reasoning_content": "I look out."},
    {"content": f"<think>\nI look out.\n</think>\n\n{_LAST}"},
)


@dataclass(frozen=True)
class Chat:
    """A conversation and what renders it; messages about it begin with `where` it is from.

    `variables` are what the template is given beside the conversation.
    """

    where: str
    tokenizer: PreTrainedTokenizerBase
    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """How a template closes an answer.

    Attributes:
        token: the last special token of the turn, if there is one.
        text: what is written up to that token; without one, all that is written.
        beyond: what follows that token after the last message.
    """

    token: int | None
    text: str
    beyond: str = ""


def template_for(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None, where: str
) -> str:
    """The template for a conversation: a tokenizer may have one for tools and one for all else."""
    if not tokenizer.chat_template:
        raise UserError(
            "chat.template: the tokenizer has none of its own; give chatml, llama3 or a file "
            f"({where}: has messages)."
        )
    mend = "give the template that fits by chat.template, as a file"
    with explained(f"{where}: no chat template of the tokenizer is for it", ValueError, mend=mend):
        return str(tokenizer.get_chat_template(tools=tools))


def templates_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """All chat templates of a tokenizer."""
    templates = tokenizer.chat_template or {}
    return list(templates.values()) if isinstance(templates, dict) else [templates]


def trials(tokenizer: PreTrainedTokenizerBase, template: str) -> Iterator[Chat]:
    """Short conversations, plain, with reasoning, with tools; a good template fits one of them."""
    for tools, answer in product((None, [_TOOL]), _ANSWERS):
        messages = [_QUESTION, {"role": "assistant"} | answer]
        yield Chat("chat.template, tried on a question", tokenizer, template, messages, tools)


def ask(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    """The text of a conversation up to where its answer begins, by the tokenizer's template."""
    where = "the conversation"
    chat = Chat(where, tokenizer, template_for(tokenizer, None, where), messages)
    return render(chat, asks=True)[0]


def require_questions(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError where a tokenizer's template fails on a short question, or never ends."""
    with bounded_memory(*_ENDLESS):
        ask(tokenizer, [_QUESTION])


@lru_cache
@bounded_memory(*_ENDLESS)
def end_of_answer(tokenizer: PreTrainedTokenizerBase, template: str) -> End:
    """What a template writes to close an answer. Raises UserError when it refuses every trial."""
    refusals = []
    for chat in trials(tokenizer, template):
        try:
            text = render(replace(chat, where="chat.template"))[0]
        except UserError as error:
            refusals.append(error)
            continue
        if len(text) > _LONGEST_TRIAL:
            raise UserError(
                f"chat.template: it makes {len(text):,} characters of a short question and answer."
            )
        after = text.rpartition(_LAST)[2]
        between = ""
        # A template may refuse a second question; then the first answer ends all there is.
        with suppress(UserError):
            twice = render(replace(chat, messages=chat.messages * 2))[0]
            between = twice.partition(_LAST)[2]
        return _end_in(tokenizer, text, after, commonprefix((after, between)))
    raise refusals[0]


def _end_in(tokenizer: PreTrainedTokenizerBase, text: str, after: str, common: str) -> End:
    """The end of the answer in a `text`.

    `after` is what follows the answer there. `common` is as much of it as also follows an answer
    that another question comes after.
    """
    special = {
        str(token): number
        for number, token in tokenizer.added_tokens_decoder.items()
        if str(token).strip()
    }
    longest_first = sorted(special, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    in_order = (token for token in pattern.findall(text) if token != tokenizer.bos_token)
    begins_turn = next(in_order, None)
    closing = list(takewhile(lambda found: found[0] != begins_turn, pattern.finditer(common)))
    closing = closing or list(pattern.finditer(after))[:1]
    if not closing:
        return End(None, after.strip())
    last = closing[-1]
    return End(special[last[0]], after[: last.end()], after[last.end() :])


def today() -> str:
    """The present day, as ISO 8601 has it."""
    return date.today().isoformat()


def keep_day(tokenizer: PreTrainedTokenizerBase, day: str) -> None:
    """Has the templates of a tokenizer be told this day, whenever they ask what day it is."""
    tokenizer.day_of_templates = day


def day_written(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The day that the templates of a tokenizer are told; None where they ask for none."""
    if not any(_DAY in template for template in templates_of(tokenizer)):
        return None
    return getattr(tokenizer, "day_of_templates", None) or today()


def render(
    chat: Chat, stop: int | None = None, asks: bool = False
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text of the messages before `stop`, and the characters in it that the template marks.

    These are None where the template marks none. If `asks`, the text ends where an answer begins.
    """
    day = day_written(chat.tokenizer)
    if day is not None:
        told = _compile_jinja_template(chat.template).environment.globals
        told[_DAY] = datetime.fromisoformat(day).strftime
    problem = f"{chat.where}: the chat template refuses it"
    mend = f"mend it or chat.template{advice_on_roles(chat)}"
    with explained(problem, TemplateError, TypeError, ValueError, OverflowError, mend=mend):
        # What it returns is not what its annotations say.
        rendered: Any = render_jinja_template(
            [chat.messages[:stop]],
            chat.tools,  # type: ignore[arg-type]
            chat_template=chat.template,
            add_generation_prompt=asks,
            return_assistant_tokens_mask=bool(_MARKED.search(chat.template)),
            **(chat.tokenizer.special_tokens_map | chat.variables),
        )
    texts, marked = rendered
    return texts[0], marked[0] if marked else None


def advice_on_roles(chat: Chat) -> str:
    """The end of a message that proposes what to do about roles that few templates know."""
    unknown = unknown_roles(chat.messages)
    if not unknown:
        return ""
    first = unknown.partition(",")[0]
    return f", or say by chat.roles what {unknown} are, such as user={first}"


def parting(chat: Chat, stop: int, asks: bool) -> str:
    """Where the texts of a conversation and of its messages before `stop` part, and how."""
    environment = _compile_jinja_template(chat.template).environment
    tree = environment.parse(chat.template)
    for output in tree.find_all(nodes.Output):
        numbered: list[nodes.Expr] = []
        for node in output.nodes:
            numbered += [nodes.TemplateData(f"\0{node.lineno}\0"), node]
        output.nodes = numbered
    template = environment.from_string(tree)
    texts = []
    lines = []
    for messages, adding in ((chat.messages, False), (chat.messages[:stop], asks)):
        variables = {"messages": messages, "tools": chat.tools, "add_generation_prompt": adding}
        written = template.render(**chat.tokenizer.special_tokens_map | chat.variables | variables)
        _, *numbers_and_pieces = re.split("\0([0-9]+)\0", written)
        numbers = numbers_and_pieces[::2]
        pieces = numbers_and_pieces[1::2]
        texts.append("".join(pieces))
        lines.append([line for line, piece in zip(numbers, pieces, strict=True) for _ in piece])
    at = len(commonprefix(texts))
    whole, part = (
        _what_is_written(text, line, at) for text, line in zip(texts, lines, strict=True)
    )
    when = "where it is asked for" if asks else "where it is last"
    return f"{whole} in the whole conversation, but {part} {when}"


def _what_is_written(text: str, lines: list[str], at: int) -> str:
    """What is written at a place of a text, and by which of the template's lines."""
    if not text[at:]:
        return "nothing is written"
    return f"line {lines[at]} writes {text[max(at - 8, 0) : at + 24]!r}"
