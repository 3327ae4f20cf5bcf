"""Rows of answers that are compared, or judged alone, to documents of two sequences."""

import json
from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lacuna.config.documents import ChatConfig
from lacuna.config.errors import UserError
from lacuna.data.chat import encode_chat, encode_texts, require_trained
from lacuna.data.document import Document
from lacuna.data.files import BROKEN, RECORD
from lacuna.data.messages import (
    LABELLED,
    PAIRS,
    conversation_columns,
    read_messages,
    read_tools,
)
from lacuna.data.sources import Documents
from lacuna.data.template import Chat, end_of_answer, parting, render, template_for
from lacuna.data.tokenize import place_of, row_of

# A prompt or an answer: text as it is, or messages that a chat template writes.
Part = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Judged:
    """A prompt and its answers, all of them texts or all messages; and how good each answer is.

    Attributes:
        where: the row and its columns, with which begins what is said against it.
        labels: of each answer 1.0 if it is wanted, 0.0 if it is not.
    """

    where: str
    prompt: Part
    answers: tuple[Part, ...]
    labels: tuple[float, ...]
    tools: list[dict[str, Any]] | None = None


def judged_columns(
    columns: Collection[str], settings: ChatConfig, loss: str, where: str = ""
) -> tuple[tuple[str, ...], dict[str, str]]:
    """As `conversation_columns`, of the columns that a loss of preferences learns from."""
    formats = (*PAIRS, *LABELLED) if loss == "kto" else PAIRS
    return conversation_columns(columns, settings, where, formats)


def answers_per_row(records: Iterable[dict[str, Any]], settings: ChatConfig, loss: str) -> int:
    """How many documents each row becomes, by the first that is readable: of a pair kto makes two."""
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
    values = {ours: row[found[ours]] for ours in needed}
    where = f"{place}, column {' and '.join(found[ours] for ours in needed)}"
    labels: tuple[float, ...] = (1.0, 0.0)
    if "label" in values:
        label = values["label"]
        if not isinstance(label, bool):
            raise UserError(
                f"{place}, column {found['label']}: should be true or false, not {label!r:.60}; "
                "mend the row, or leave it out"
            )
        labels = (float(label),)
        answers = [values["completion"]]
    else:
        answers = [values["chosen"], values["rejected"]]
    if "messages" in values:
        prompt = read_messages(values["messages"], where, settings)
        parts = _prompted(prompt, answers, where, settings)
    elif "prompt" in values:
        parts = _prompted(values["prompt"], answers, where, settings)
    else:
        parts = _common_beginning(answers, where, tokenizer, settings)
    judged = Judged(where, parts[0], tuple(parts[1]), labels, read_tools(row, found, place))
    _require_answers(judged, is_cut="chosen" in needed and len(needed) == 2)
    return judged


def _prompted(
    prompt: Any, answers: list[Any], where: str, settings: ChatConfig
) -> tuple[Part, list[Part]]:
    """A prompt that was given, and the answers to it, as texts if all of them are."""
    if isinstance(prompt, str):
        if all(isinstance(answer, str) for answer in answers):
            return prompt, answers
        asked = [{"role": "user", "content": prompt}]
    else:
        asked = read_messages(prompt, where, settings)
    return asked, [_answer_to(asked, answer, where, settings) for answer in answers]


def _answer_to(
    asked: list[dict[str, Any]], answer: Any, where: str, settings: ChatConfig
) -> list[dict[str, Any]]:
    """The messages of an answer, which may come as text, or behind the prompt once more."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    messages = read_messages(answer, where, settings)
    if messages[: len(asked)] == asked:
        return messages[len(asked) :]
    if messages and messages[0]["role"] != "assistant":
        raise UserError(
            f"{where}: an answer is a conversation that does not begin with the prompt; give the "
            "same prompt, or the answer's own messages alone"
        )
    return messages


def _common_beginning(
    answers: list[Any], where: str, tokenizer: PreTrainedTokenizerBase, settings: ChatConfig
) -> tuple[Part, list[Part]]:
    """The prompt that is the beginning of two conversations or texts, and what follows in each."""
    if all(isinstance(answer, str) for answer in answers):
        count = _alike(answers, tokenizer)
        unit = "texts"
    else:
        answers = [read_messages(answer, where, settings) for answer in answers]
        same = takewhile(lambda two: two[0] == two[1], zip(*answers, strict=False))
        count = len(list(same))
        unit = "conversations"
    if answers[0] != answers[1] and not count:
        raise UserError(
            f"{where}: the two {unit} do not begin alike, so they share no prompt; leave the row "
            "out, or give their prompt in a column prompt"
        )
    return answers[0][:count], [answer[count:] for answer in answers]


def _alike(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> int:
    """The characters with which two texts begin alike, up to the last whole token of both."""
    encodings = [
        tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for text in texts
    ]
    first = encodings[0]["input_ids"]
    same = len(commonprefix([encoding["input_ids"] for encoding in encodings]))
    begins = [start for start, _ in encodings[0]["offset_mapping"]]
    count = begins[same] if same < len(first) else len(texts[0])
    return min(count, len(commonprefix(texts)))


def _require_answers(judged: Judged, is_cut: bool) -> None:
    """Raises UserError where answers are the same, or one says nothing.

    Of texts whose prompt `is_cut` off, one may end where they part: its end is what is trained.
    """
    first, *others = judged.answers
    if first in others:
        raise UserError(
            f"{judged.where}: both answers are the same, so neither is better; leave the row out"
        )
    for answer in judged.answers:
        if isinstance(answer, str):
            is_empty = not answer.strip() and not is_cut
        else:
            if answer and answer[-1]["role"] != "assistant":
                raise UserError(
                    f"{judged.where}: an answer ends with a message of {answer[-1]['role']}; it "
                    "must be the assistant's: leave the row out, or say by chat.roles who that is"
                )
            last = answer[-1] if answer else {}
            is_empty = not (last.get("tool_calls") or (last.get("content") or "").strip())
        if is_empty:
            raise UserError(f"{judged.where}: an answer is empty; leave the row out")


def judged_document(
    row: dict[str, Any], number: int | str, source: Documents, tokenizer: PreTrainedTokenizerBase
) -> Document:
    """The document of this number of a source of preferences, whose record holds `row`.

    Raises UserError as `read_judged` does.
    """
    settings, loss = source.chat, source.preference.loss
    judged = read_judged(row, place_of(number, source), tokenizer, settings, loss)
    if loss != "kto":
        return encode_pair(judged, tokenizer, settings)
    following = _next_judged(int(number), source, tokenizer)
    answer = int(number) % source.answers_per_row
    return encode_labelled(judged, answer, following, tokenizer, settings)


def _next_judged(number: int, source: Documents, tokenizer: PreTrainedTokenizerBase) -> Judged:
    """What is judged in the next readable row after that of a document, the first after the last."""
    count, step = len(source.dataset), source.answers_per_row
    for other in range(number + step, number + count + 1, step):
        record = source.dataset[other % count]
        if not record.get(BROKEN):
            break
    place = place_of(other % count, source)
    row = row_of(record, source)
    return read_judged(row, place, tokenizer, source.chat, source.preference.loss)


def encode_pair(
    judged: Judged, tokenizer: PreTrainedTokenizerBase, settings: ChatConfig
) -> Document:
    """A pair as one document: the prompt with the better answer, and again with the other."""
    answers = judged.answers
    return _document(judged, answers, {"chosen": judged.labels}, tokenizer, settings)


def encode_labelled(
    judged: Judged,
    number: int,
    following: Judged,
    tokenizer: PreTrainedTokenizerBase,
    settings: ChatConfig,
) -> Document:
    """One answer of a row as a document, beside the prompt with an answer of the `following` row.

    The second sequence tells how likely the model finds what does not belong to the prompt.
    """
    answer, label = judged.answers[number], judged.labels[number]
    other = following.answers[number % len(following.answers)]
    if isinstance(answer, str) != isinstance(other, str):
        raise UserError(
            f"{following.where}: is text where the row before has messages, or the other way "
            "round; give all rows the same form"
        )
    columns = {"chosen": (label, label), "mismatched": (0.0, 1.0)}
    return _document(judged, (answer, other), columns, tokenizer, settings)


def _document(
    judged: Judged,
    answers: Collection[Part],
    columns: dict[str, tuple[float, ...]],
    tokenizer: PreTrainedTokenizerBase,
    settings: ChatConfig,
) -> Document:
    """The prompt with each of the answers, one sequence after the other."""
    chats = [_chat(judged, answer, tokenizer) for answer in answers if not isinstance(answer, str)]
    if chats:
        asked = len(judged.prompt)
        encoded = [encode_chat(chat, asked, settings) for chat in chats]
        _require_same_prompt(chats, asked, [tokens for tokens, _ in encoded])
    else:
        encoded = [encode_texts(judged.prompt, answer, tokenizer) for answer in answers]
    for _, trained in encoded:
        require_trained(trained, judged.where)
    return Document(
        np.concatenate([tokens for tokens, _ in encoded]),
        float("nan"),
        trained=np.concatenate([trained for _, trained in encoded]),
        ends=tuple(np.cumsum([len(tokens) for tokens, _ in encoded]).tolist()),
        sequence_columns=columns,
    )


def _chat(judged: Judged, answer: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Chat:
    """The prompt with an answer; a copy, since templates have calls of tools rewritten."""
    messages, tools = deepcopy(([*judged.prompt, *answer], judged.tools))
    template = template_for(tokenizer, tools, judged.where)
    return Chat(judged.where, tokenizer, template, messages, tools)


def _require_same_prompt(chats: list[Chat], asked: int, tokens: list[np.ndarray]) -> None:
    """Raises UserError where the first `asked` messages became other tokens in another sequence."""
    shorter = min(map(len, tokens))
    differing = np.flatnonzero(tokens[0][:shorter] != tokens[1][:shorter])
    alike = differing[0] if len(differing) else shorter
    chat = chats[0]
    closing = end_of_answer(chat.tokenizer, chat.template).beyond
    text = render(chat, asked)[0].removesuffix(closing)
    prompt = chat.tokenizer(text, add_special_tokens=False, verbose=False)
    if alike < len(prompt["input_ids"]):
        raise UserError(
            f"{chat.where}: the prompt becomes other tokens before another answer, because the "
            f"chat template rewrites it: {parting(chat, asked, False)}; set chat.template"
        )
