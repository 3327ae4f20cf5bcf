"""Rows of answers that are compared or judged alone: what they ask, and how good an answer is."""

import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from lacuna.config.conversations import ChatConfig
from lacuna.config.errors import UserError
from lacuna.data.files import BROKEN, RECORD, of_json
from lacuna.data.messages import (
    behind_system,
    columns_by_our_names,
    fitting_format,
    read_messages,
    read_system,
    read_tools,
    read_variables,
    refuse_system,
)

# Of each way to write pairs, and single answers, our names of the columns that it needs.
_PAIRS = (
    ("prompt", "chosen", "rejected"),
    ("messages", "chosen", "rejected"),
    ("chosen", "rejected"),
)
_LABELLED = ("prompt", "completion", "label")

# The labels of a pair.
_BETTER_FIRST = (1.0, 0.0)

Messages = list[dict[str, Any]]
# A prompt or an answer: text as it is, or messages that a chat template writes.
Part = str | Messages


@dataclass(frozen=True)
class Judged:
    """A prompt and its answers, all of them texts or all messages; and how good each answer is.

    Attributes:
        where: the row and its columns, with which begins what is said against it.
        labels: of each answer 1.0 if it is wanted, 0.0 if it is not.
        variables: what the chat template is given beside the conversation.
    """

    where: str
    prompt: Part
    answers: tuple[Part, ...]
    labels: tuple[float, ...]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def judged_columns(
    columns: Collection[str], settings: ChatConfig, loss: str, where: str = ""
) -> tuple[tuple[str, ...], dict[str, str]]:
    """As `conversation_columns`, of the columns that a loss of preferences learns from."""
    found = columns_by_our_names(columns, settings)
    formats = (*_PAIRS, _LABELLED) if loss == "kto" else _PAIRS
    needed = fitting_format(formats, found, settings)
    if needed is not None:
        return needed, found
    if loss != "kto" and found.keys() >= {*_LABELLED}:
        raise UserError(
            f"{where}has answers with a label, which only one loss learns from: give chosen and "
            'rejected, or set job.task = "preference" and preference.loss = "kto"'
        )
    usual = "chosen and rejected (with prompt or messages, or without)"
    if loss == "kto":
        usual += ", or prompt, completion and label"
    raise UserError(
        f"{where}no columns {', '.join(settings.columns) or usual}, but {', '.join(columns)}; say "
        "by chat.columns which hold the answers, such as chosen=better,rejected=worse"
    )


def answers_per_row(records: Iterable[dict[str, Any]], settings: ChatConfig, loss: str) -> int:
    """How many documents each row becomes, by the first readable one: two where kto reads pairs."""
    if loss != "kto":
        return 1
    for record in records:
        if not record.get(BROKEN):
            row = json.loads(record[RECORD]) if RECORD in record else record
            needed, _ = judged_columns(_present(row), settings, loss)
            return 1 if "label" in needed else 2
    return 1


def _present(row: dict[str, Any]) -> list[str]:
    return [name for name, value in row.items() if value is not None]


def read_judged(
    row: dict[str, Any],
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    settings: ChatConfig,
    loss: str,
) -> Judged:
    """What a row asks, and its answers: two, of which the first is better, or one with a label.

    Raises UserError that tells the place, the column and what is wrong there.
    """
    needed, found = judged_columns(_present(row), settings, loss, f"{place}: ")
    values = {ours: _of_json_text(row[found[ours]]) for ours in needed}
    where = f"{place}, column {' and '.join(found[ours] for ours in needed)}"
    if "label" in values:
        label = values["label"]
        if label not in (0, 1):  # which true and false are equal to
            raise UserError(
                f"{place}, column {found['label']}: should be true or false, or 1 or 0, not "
                f"{label!r:.60}; mend the row, or leave it out"
            )
        labels: tuple[float, ...] = (float(label),)
        given = [values["completion"]]
    else:
        labels = _BETTER_FIRST
        given = [values["chosen"], values["rejected"]]
    is_cut = False
    prompt: Part
    answers: tuple[Part, ...]
    if "messages" in values:
        asked = read_messages(values["messages"], where, settings)
        prompt, answers = _prompted(asked, given, where, settings)
    elif "prompt" in values:
        prompt, answers = _prompted(values["prompt"], given, where, settings)
    elif all(isinstance(text, str) for text in given):
        prompt, answers = _texts_from_their_parting(given, where, tokenizer)
        is_cut = True
    else:
        talks = [read_messages(value, where, settings) for value in given]
        prompt, answers = _messages_from_their_parting(talks, where)
    system = read_system(row, found, place)
    if isinstance(prompt, str):
        refuse_system(system, found, place)
    else:
        prompt = behind_system(prompt, system)
    tools = read_tools(row, found, place)
    judged = Judged(where, prompt, answers, labels, tools, read_variables(row, place))
    _require_answers(judged, may_be_empty=is_cut)
    return judged


def _of_json_text(value: Any) -> Any:
    """A value as it is, but messages where a text holds them as JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    with suppress(ValueError):
        return of_json(value.encode())
    return value


def _prompted(
    prompt: Any, given: list[Any], where: str, settings: ChatConfig
) -> tuple[Part, tuple[Part, ...]]:
    """A prompt that was given, and the answers to it, as texts if all of them are."""
    if not isinstance(prompt, str):
        asked = read_messages(prompt, where, settings)
    elif all(isinstance(answer, str) for answer in given):
        return prompt, tuple(given)
    else:
        asked = [{"role": "user", "content": prompt}]
    return asked, tuple(_answer_to(asked, answer, where, settings) for answer in given)


def _answer_to(asked: Messages, answer: Any, where: str, settings: ChatConfig) -> Messages:
    """The messages of an answer, which may come as text, or behind the prompt once more."""
    if isinstance(answer, str):
        messages = [{"role": "assistant", "content": answer}]
    else:
        messages = read_messages(answer, where, settings)
    if messages[: len(asked)] == asked:
        return messages[len(asked) :]
    if messages and messages[0]["role"] != "assistant":
        raise UserError(
            f"{where}: an answer is a conversation that does not begin with the prompt; give the "
            "same prompt, or the answer's own messages alone"
        )
    if asked and asked[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: the prompt ends with an answer, and another would follow; give the messages "
            "before it alone"
        )
    return messages


def _messages_from_their_parting(
    talks: list[Messages], where: str
) -> tuple[Messages, tuple[Messages, ...]]:
    """The messages with which two conversations begin alike, and what follows in each."""
    same = takewhile(lambda two: two[0] == two[1], zip(*talks, strict=False))
    count = len(list(same))
    if not count:
        raise _without_prompt("conversations", where)
    return talks[0][:count], tuple(talk[count:] for talk in talks)


def _texts_from_their_parting(
    texts: list[str], where: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, tuple[str, ...]]:
    """The text with which two texts begin alike, up to a token's end in both, and what follows."""
    encodings = [
        tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for text in texts
    ]
    same_tokens = len(commonprefix([encoding["input_ids"] for encoding in encodings]))
    begins = [start for start, _ in encodings[0]["offset_mapping"]]
    ends_alike = [*begins, len(texts[0])][same_tokens]
    count = min(ends_alike, len(commonprefix(texts)))
    if not count:
        raise _without_prompt("texts", where)
    return texts[0][:count], tuple(text[count:] for text in texts)


def _without_prompt(units: str, where: str) -> UserError:
    return UserError(
        f"{where}: the two {units} do not begin alike, so they share no prompt; leave the row out, "
        "or give their prompt in a column prompt"
    )


def _require_answers(judged: Judged, may_be_empty: bool) -> None:
    """Raises UserError where answers are the same, or one of them says nothing.

    A text may do so where it ends at the parting of two: then its end is what is trained.
    """
    if len(judged.answers) == 2 and judged.answers[0] == judged.answers[1]:
        raise UserError(
            f"{judged.where}: both answers are the same, so neither is better; leave the row out"
        )
    for answer in judged.answers:
        if isinstance(answer, str):
            is_empty = not answer.strip() and not may_be_empty
        else:
            is_empty = not answer or _says_nothing(answer[-1], judged.where)
        if is_empty:
            raise UserError(f"{judged.where}: an answer is empty; leave the row out")


def _says_nothing(last: dict[str, Any], where: str) -> bool:
    """Whether the last message of an answer is empty; raises UserError if someone else says it."""
    if last["role"] != "assistant":
        raise UserError(
            f"{where}: an answer ends with a message of {last['role']}; it must be the "
            "assistant's: leave the row out, or say by chat.roles who that is"
        )
    content = last.get("content") or ""
    return not content.strip() and not last.get("tool_calls")
