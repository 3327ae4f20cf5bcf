"""What is judged to documents of two sequences, the prompt with each of two answers."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lacuna.config.conversations import ChatConfig
from lacuna.config.errors import UserError
from lacuna.data.chat import encode_chat, encode_texts, require_trained
from lacuna.data.document import Document
from lacuna.data.files import BROKEN
from lacuna.data.judged import Judged, Messages, Part, read_judged
from lacuna.data.sources import Documents
from lacuna.data.template import Chat, end_of_answer, parting, render, template_for
from lacuna.data.tokenize import place_of, row_of


def judged_document(
    row: dict[str, Any], number: int | str, source: Documents, tokenizer: PreTrainedTokenizerBase
) -> Document:
    """The document of this number of a source of preferences, whose record holds `row`.

    Raises UserError as `read_judged` does.
    """
    settings, loss = settings_of(source)
    judged = read_judged(row, place_of(number, source), tokenizer, settings, loss)
    if loss != "kto":
        return encode_pair(judged, tokenizer, settings)
    if len(judged.answers) != source.answers_per_row:
        raise UserError(
            f"{judged.where}: is a pair where the first row is one answer with a label, or the "
            "other way round; give all rows the same form"
        )
    following = _next_judged(int(number), source, tokenizer)
    return encode_labelled(
        judged, int(number) % source.answers_per_row, following, tokenizer, settings
    )


def settings_of(source: Documents) -> tuple[ChatConfig, str]:
    """How the messages of a source of preferences become tokens, and the loss they are for."""
    assert source.chat is not None and source.preference is not None
    return source.chat, source.preference.loss


def _next_judged(number: int, source: Documents, tokenizer: PreTrainedTokenizerBase) -> Judged:
    """What is judged in the next readable row after a document's; after the last in the first."""
    count = len(source.dataset)
    step = source.answers_per_row
    others = (other % count for other in range(number + step, number + count + 1, step))
    other = next(other for other in others if not source.dataset[other].get(BROKEN))
    row = row_of(source.dataset[other], source)
    return read_judged(row, place_of(other, source), tokenizer, *settings_of(source))


def encode_pair(
    judged: Judged, tokenizer: PreTrainedTokenizerBase, settings: ChatConfig
) -> Document:
    """A pair as one document: the prompt with the better answer, and again with the other."""
    return _document(judged, judged.answers, {"chosen": judged.labels}, tokenizer, settings)


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
    answer = judged.answers[number]
    label = judged.labels[number]
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
    answers: Sequence[Part],
    columns: Mapping[str, tuple[float, ...]],
    tokenizer: PreTrainedTokenizerBase,
    settings: ChatConfig,
) -> Document:
    """The prompt with each of the answers, one sequence after the other."""
    prompt = judged.prompt
    if isinstance(prompt, str):
        encoded = [encode_texts(prompt, str(answer), tokenizer) for answer in answers]
    else:
        chats = [_chat(judged, [*prompt, *answer], tokenizer) for answer in answers]
        encoded = [encode_chat(chat, len(prompt), settings) for chat in chats]
        _require_same_prompt(chats[0], len(prompt), *(tokens for tokens, _ in encoded))
    for _, trained in encoded:
        require_trained(trained, judged.where)
    return Document(
        np.concatenate([tokens for tokens, _ in encoded]),
        float("nan"),
        trained=np.concatenate([trained for _, trained in encoded]),
        ends=tuple(np.cumsum([len(tokens) for tokens, _ in encoded]).tolist()),
        sequence_columns=columns,
    )


def _chat(judged: Judged, messages: Messages, tokenizer: PreTrainedTokenizerBase) -> Chat:
    """A conversation of a row; of copies, as what is in it may be rewritten for the template."""
    messages, tools = deepcopy((messages, judged.tools))
    template = template_for(tokenizer, tools, judged.where)
    return Chat(judged.where, tokenizer, template, messages, tools, judged.variables)


def _require_same_prompt(chat: Chat, asked: int, tokens: np.ndarray, others: np.ndarray) -> None:
    """Raises UserError where the first `asked` messages are other tokens in the other sequence."""
    shorter = min(len(tokens), len(others))
    differing = np.flatnonzero(tokens[:shorter] != others[:shorter])
    alike = int(differing[0]) if len(differing) else shorter
    closing = end_of_answer(chat.tokenizer, chat.template).beyond
    text = render(chat, asked)[0].removesuffix(closing)
    prompt = chat.tokenizer(text, add_special_tokens=False, verbose=False)
    if alike < len(prompt["input_ids"]):
        raise UserError(
            f"{chat.where}: the prompt becomes other tokens before another answer, because the "
            f"chat template rewrites it: {parting(chat, asked, False)}; set chat.template"
        )
