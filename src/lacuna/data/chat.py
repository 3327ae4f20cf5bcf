"""Conversations to tokens, and which of them are trained."""

from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lacuna.config.documents import ChatConfig
from lacuna.config.errors import UserError, explained, nearby, refuse
from lacuna.config.fields import RECIPES
from lacuna.data.document import Document
from lacuna.data.messages import (
    conversation_columns,
    instructed,
    read,
    read_messages,
    read_tools,
    unknown_roles,
)
from lacuna.data.template import (
    Chat,
    end_of_answer,
    parting,
    render,
    template_for,
    templates_of,
    trials,
    written,
)
from lacuna.data.tokenizer import tokenize_text


def use_template(tokenizer: PreTrainedTokenizerBase, settings: ChatConfig) -> None:
    """Give a tokenizer, which has all its tokens by now, the chat template of the settings, if they name one.

    Raises UserError when it has none in the end, or one from which a model could not learn to end
    its turn.
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
    refusals = []
    for trial in chain.from_iterable(
        trials(tokenizer, template) for template in templates_of(tokenizer)
    ):
        try:
            return _try_template(trial, settings)
        except UserError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _try_template(trial: Chat, settings: ChatConfig) -> None:
    """Raises UserError when a template refuses a trial, or does not end its answer so that it is trained."""
    end = end_of_answer(trial.tokenizer, trial.template)
    wrong = f"chat.template: after an answer there is {end.text!r}; there must be a special token of the tokenizer"
    marks = "and where there are {% generation %} marks, within or right after them, for a model to learn to stop"
    mend = "name the token in model.new_tokens, or give another template"
    refuse(
        {
            f"{wrong}, {marks}; {mend}": end.token is None
            or end.token not in _trained_tokens(*encode_chat(trial, 0, settings))
        }
    )


def _trained_tokens(tokens: np.ndarray, trained: np.ndarray) -> np.ndarray:
    return tokens[trained]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens at which an answer ends: the end of text, and what its chat templates put behind an answer."""
    ends = [tokenizer.eos_token_id]
    for template in templates_of(tokenizer):
        with suppress(UserError):  # a template that nobody trains on may refuse every trial
            ends.append(end_of_answer(tokenizer, template).token)
    return [end for end in dict.fromkeys(ends) if end is not None]


def encode(
    record: dict[str, Any], place: str, tokenizer: PreTrainedTokenizerBase, settings: ChatConfig
) -> Document:
    """The tokens of a row, and which of them are trained.

    `use_template` has prepared the tokenizer. Raises UserError that tells the place, the column and
    what is wrong there when the row does not fit, also when nothing of it would be trained.
    """
    needed, found = conversation_columns(record, settings, f"{place}: ")
    values = {ours: record[found[ours]] for ours in needed}
    where = f"{place}, column {' and '.join(found[ours] for ours in needed)}"
    if "text" in values:
        tokens = tokenize_text(tokenizer, read(values["text"], str, where))
        trained = np.ones(len(tokens), dtype=bool)
    elif isinstance(values.get("prompt"), str):
        completion = read(values["completion"], str, where)
        tokens, trained = encode_texts(values["prompt"], completion, tokenizer)
    else:
        parts = _parts(values, record.get(found.get("input")), where, settings)
        tools = read_tools(record, found, place)
        template = template_for(tokenizer, tools, where)
        chat = Chat(where, tokenizer, template, sum(parts, []), tools)
        tokens, trained = encode_chat(chat, len(chat.messages) - len(parts[-1]), settings)
    require_trained(trained, where)
    return Document(tokens, float("nan"), trained=trained)


def require_trained(trained: np.ndarray, where: str) -> None:
    """Raises UserError where no token but the first, which none predicts, would be trained."""
    if not trained[1:].any():
        raise UserError(
            f"{where}: no token would be trained; leave the row out, or mend chat.template"
        )


def _parts(
    values: dict[str, Any], more: Any, where: str, settings: ChatConfig
) -> list[list[dict[str, Any]]]:
    """The messages of each column, those of the last one trained."""
    if "instruction" in values:
        return instructed(values, more, where)
    return [read_messages(value, where, settings) for value in values.values()]


def encode_texts(
    prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a prompt as a model is given it and of its answer, which ends the text; no token is of both.

    Returns int32 tokens, and bool of the same shape: those of the answer are trained.
    """
    asked, answer = (
        tokenize_text(tokenizer, prompt),
        tokenize_text(tokenizer, completion, begins=False),
    )
    ends = tokenizer.eos_token_id is not None and not prompt.endswith(tokenizer.eos_token)
    asked = asked[:-1] if ends else asked
    return np.concatenate([asked, answer]), np.arange(len(asked) + len(answer)) >= len(asked)


def encode_chat(chat: Chat, first: int, settings: ChatConfig) -> tuple[np.ndarray, np.ndarray]:
    """The int32 tokens of a conversation, and as bool which are trained: answers from message `first` on."""
    answers = [
        number for number, message in enumerate(chat.messages) if message["role"] == "assistant"
    ]
    turns = [turn for turn in answers if turn >= first][-1 if settings.train_on == "last" else 0 :]
    unknown = unknown_roles(chat.messages)
    say = f"say by chat.roles which of {unknown} is the assistant, such as assistant={unknown.rpartition(' ')[2]}, or "
    lacking = "no message is the assistant's" if chat.messages else "the conversation is empty"
    refuse({f"{chat.where}: {lacking}; {say if unknown else ''}leave the row out": not turns})
    chat = written(chat, turns)
    text, spans = render(chat)
    if spans is None:
        spans = [_answer(chat, text, turn, turn < turns[-1]) for turn in reversed(turns)]
    elif turns[0] > answers[0]:
        spans = spans[len(render(chat, turns[0])[1]) :]
    encoding = chat.tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    tokens = np.array(encoding["input_ids"], dtype=np.int32)
    starts, stops = np.array(encoding["offset_mapping"]).reshape(-1, 2).T
    trained = np.zeros(len(tokens), dtype=bool)
    ends = tuple(chat.tokenizer.convert_ids_to_tokens(end_of_turn(chat.tokenizer)))
    for first_character, beyond in spans:
        start = np.searchsorted(stops, first_character, side="right")
        trained[start : np.searchsorted(starts, _with_end(chat, text, beyond, ends))] = True
    return tokens, trained


def _with_end(chat: Chat, text: str, beyond: int, ends: tuple[str, ...]) -> int:
    """Where an answer whose characters before `beyond` are trained ends, with all that closes it."""
    end = end_of_answer(chat.tokenizer, chat.template).text
    if text[:beyond].rstrip().endswith(ends):
        return beyond
    within = max(count for count in range(len(end) + 1) if text.endswith(end[:count], 0, beyond))
    return beyond + next(
        (len(rest) for rest in (end[within:], *ends) if rest and text.startswith(rest, beyond)), 0
    )


def _answer(chat: Chat, whole: str, turn: int, is_earlier: bool) -> tuple[int, int]:
    """The characters of `whole` that answer: from where message `turn` is asked for to the token that ends its turn.

    Raises UserError unless `whole` begins with the conversation before the message, and with that
    up to its end.
    """
    end = end_of_answer(chat.tokenizer, chat.template)
    last = chat.tokenizer.convert_ids_to_tokens(end.token)
    asked = render(chat, turn, asks=True)[0]
    answered = whole if turn + 1 == len(chat.messages) else render(chat, turn + 1)[0]
    answered = answered.removesuffix(end.beyond)
    ended = answered.rfind(last, len(asked))
    answered = answered[: ended + len(last)] if ended >= 0 else answered.rstrip()
    for beginning, stop, asks in ((asked, turn, True), (answered, turn + 1, False)):
        if not whole.startswith(beginning):
            last = ', or set chat.train_on = "last"' if is_earlier else ""
            wrong = "where it begins and ends cannot be told, because the chat template rewrites"
            mend = f'give a template with {{% generation %}} marks, such as chat.template = "chatml"{last}'
            raise UserError(
                f"{chat.where}, message {turn + 1}: {wrong}: {parting(chat, stop, asks)}; {mend}"
            )
    return len(asked), len(answered)
