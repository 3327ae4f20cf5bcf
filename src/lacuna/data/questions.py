"""Questions of data that has conversations or prompts, and the conversations that answers make."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.data.files import BROKEN
from lacuna.data.messages import (
    REASONING,
    VARIABLES,
    behind_system,
    columns_by_our_names,
    instructed,
    read,
    read_messages,
    read_system,
    read_tools,
    read_variables,
)
from lacuna.data.sources import Documents
from lacuna.data.template import Chat, render, template_for
from lacuna.data.tokenize import add_broken, place_of, row_of

_THOUGHT = ("<think>", "</think>")


@dataclass(frozen=True)
class Question:
    """A row of data, and the conversation in it whose next message is wanted."""

    row: dict[str, Any]
    chat: Chat

    @cached_property
    def text(self) -> str:
        """The text after which the answer is to come."""
        return render(self.chat, asks=True)[0]

    def answered(self, answer: str) -> tuple[dict[str, Any], str]:
        """The conversation with an answer, as a row of data; and the answer without its reasoning.

        Reasoning has a field of its own where the chat template has one for it.
        """
        if self.text.rstrip().endswith(_THOUGHT[0]):  # the template has begun it
            answer = f"{_THOUGHT[0]}\n{answer}"
        before, mark, after = answer.rpartition(_THOUGHT[1])
        message = {"role": "assistant", "content": answer}
        key = next((key for key in REASONING if key in self.chat.template), None)
        if mark and key is not None:
            thought = before.strip().removeprefix(_THOUGHT[0])
            message = {
                "role": "assistant",
                key: thought.strip("\n"),
                "content": after.lstrip("\n"),
            }
        row: dict[str, Any] = {"messages": [*self.chat.messages, message]}
        if self.chat.tools:
            row["tools"] = self.chat.tools
        if self.chat.variables:
            row[VARIABLES] = self.chat.variables
        return row, after.lstrip("\n")


def read_questions(
    sources: Sequence[Documents],
    settings: ChatConfig,
    tokenizer: PreTrainedTokenizerBase,
    most_broken: int,
) -> Iterator[Question]:
    """The question of every row that can be read.

    Raises UserError for rows that have none, and when more than `most_broken` cannot be read.
    """
    broken: dict[str, None] = {}
    for source in sources:
        for number, record in enumerate(source.dataset):
            if record.get(BROKEN):
                add_broken(broken, [record[BROKEN]], most_broken)
                continue
            place = place_of(number, source)
            yield question_of(row_of(record, source), place, settings, tokenizer)


def question_of(
    row: dict[str, Any],
    place: str,
    settings: ChatConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,
) -> Question:
    """The question of a row: its messages without the answers at their end, or its prompt.

    It tells of the tools of the row, or of those that are given. Raises UserError where there is no
    question, or there are tools of both.
    """
    found = columns_by_our_names(row, settings)
    own_tools = read_tools(row, found, place)
    if own_tools and tools:
        raise UserError(
            f"{place}: has tools of its own, of which only rollout.tools could be called: leave "
            "the column out, or call them in a rollout.environment."
        )
    tools = own_tools or tools or None
    messages: list[dict[str, Any]] = []
    if "messages" in found:
        messages = read_messages(
            row[found["messages"]], f"{place}, column {found['messages']}", settings
        )
    elif isinstance(row.get(found.get("prompt", "")), str):
        messages = [{"role": "user", "content": row[found["prompt"]]}]
    elif "prompt" in found:
        messages = read_messages(
            row[found["prompt"]], f"{place}, column {found['prompt']}", settings
        )
    elif "instruction" in found:
        asked = read(row[found["instruction"]], str, place)
        values = {"instruction": asked, "output": ""}
        messages = instructed(values, row.get(found.get("input", "")), place)[0]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(
            f"{place}: asks nothing: give rows with messages, a prompt or an instruction, or "
            "say by chat.columns which column is which, such as prompt=question."
        )
    messages = behind_system(messages, read_system(row, found, place))
    template = template_for(tokenizer, tools, place)
    return Question(
        row, Chat(place, tokenizer, template, messages, tools, read_variables(row, place))
    )
