"""Turns conversations into tokens, and says which of the tokens are trained."""

from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lacuna.config.conversations import ChatConfig
from lacuna.config.errors import UserError, explained, nearby
from lacuna.config.fields import RECIPES
from lacuna.data.document import Document
from lacuna.data.marks import fitted_to_template
from lacuna.data.messages import (
    behind_system,
    conversation_columns,
    instructed,
    is_trained,
    read,
    read_messages,
    read_system,
    read_tools,
    read_variables,
    refuse_system,
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
)
from lacuna.data.tokenizer import tokenize_text


def use_template(tokenizer: PreTrainedTokenizerBase, settings: ChatConfig) -> None:
    """Gives a tokenizer the chat template that the settings name, if they name one.

    The tokenizer must have all its tokens already. Without a template it remains as it is: texts
    need none, and messages ask for one where they are read. Raises UserError when a model could not
    learn to end its turn from the template.
    """
    if settings.template is not None:
        packaged = RECIPES / "templates" / f"{settings.template}.jinja"
        file = packaged if packaged.is_file() else Path(settings.template)
        problem = f"chat.template: give chatml, llama3 or a file (got {settings.template})"
        mend = "write it in UTF-8" if file.is_file() else nearby(file)
        with explained(problem, OSError, ValueError, mend=mend):
            tokenizer.chat_template = file.read_text(encoding="utf-8")
    if not tokenizer.is_fast:
        raise UserError(
            "model.tokenizer_path: conversations need a fast tokenizer, which tells the place of "
            "each token."
        )
    if not tokenizer.chat_template:
        return
    refusals = []
    templates = templates_of(tokenizer)
    for trial in chain.from_iterable(trials(tokenizer, template) for template in templates):
        try:
            _try_template(trial, settings)
            return
        except UserError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _try_template(trial: Chat, settings: ChatConfig) -> None:
    """Raises UserError when a template refuses a trial, or does not train the end of its answer."""
    end = end_of_answer(trial.tokenizer, trial.template)
    is_trained = False
    if end.token is not None:
        tokens, trained = encode_chat(trial, 0, settings)
        is_trained = end.token in tokens[trained]
    if not is_trained:
        raise UserError(
            f"chat.template: after an answer there is {end.text!r}; there must be a special token "
            "of the tokenizer, and where there are {% generation %} marks, within or right after "
            "them, for a model to learn to stop; name the token in model.new_tokens, or give "
            "another template."
        )


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer: the end of text, and what templates put after answers."""
    ends = [tokenizer.eos_token_id]
    for template in templates_of(tokenizer):
        with suppress(UserError):  # a template that nobody trains on may refuse every trial
            ends.append(end_of_answer(tokenizer, template).token)
    return [end for end in dict.fromkeys(ends) if end is not None]


def encode(
    record: dict[str, Any], place: str, tokenizer: PreTrainedTokenizerBase, settings: ChatConfig
) -> Document:
    """The tokens of a row, and which of them are trained.

    `use_template` has prepared the tokenizer. Raises UserError when the row cannot be used, or when
    nothing of it would be trained; the message names the place, the column and what is wrong there.
    """
    needed, found = conversation_columns(record, settings, f"{place}: ")
    values = {ours: record[found[ours]] for ours in needed}
    where = f"{place}, column {' and '.join(found[ours] for ours in needed)}"
    if "text" in values:
        tokens = tokenize_text(tokenizer, read(values["text"], str, where))
        trained = np.ones(len(tokens), dtype=bool)
    elif isinstance(values.get("prompt"), str):
        refuse_system(read_system(record, found, place), found, place)
        completion = read(values["completion"], str, where)
        tokens, trained = encode_texts(values["prompt"], completion, tokenizer)
    else:
        parts = _messages_by_column(values, record.get(found.get("input", "")), where, settings)
        parts[0] = behind_system(parts[0], read_system(record, found, place))
        tools = read_tools(record, found, place)
        template = template_for(tokenizer, tools, where)
        variables = read_variables(record, place)
        chat = Chat(where, tokenizer, template, sum(parts, []), tools, variables)
        tokens, trained = encode_chat(chat, len(chat.messages) - len(parts[-1]), settings)
    require_trained(trained, where)
    return Document(tokens, float("nan"), trained=trained)


def require_trained(trained: np.ndarray, where: str) -> None:
    """Raises UserError where no token after the first, which none predicts, would be trained."""
    if not trained[1:].any():
        raise UserError(
            f"{where}: no token would be trained; leave the row out, or mend chat.template"
        )


def _messages_by_column(
    values: dict[str, Any], more: Any, where: str, settings: ChatConfig
) -> list[list[dict[str, Any]]]:
    """The messages of each column; those of the last column are trained."""
    if "instruction" in values:
        return instructed(values, more, where)
    return [read_messages(value, where, settings) for value in values.values()]


def encode_texts(
    prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a prompt, as a model is given it, and then of the answer, which ends the text.

    Both are tokenised apart, so that no token spans them. Returns int32 tokens, and bool of the
    same shape: the tokens of the answer are trained.
    """
    asked = tokenize_text(tokenizer, prompt)
    answer = tokenize_text(tokenizer, completion, begins=False)
    ends = tokenizer.eos_token_id is not None and not prompt.endswith(tokenizer.eos_token)
    asked = asked[:-1] if ends else asked
    return np.concatenate([asked, answer]), np.arange(len(asked) + len(answer)) >= len(asked)


def encode_chat(chat: Chat, first: int, settings: ChatConfig) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a conversation, in which the answers from message `first` on are trained.

    Those are left out that the data says are not to be. Returns int32 tokens, and bool of the same
    shape: whether each is trained.
    """
    answers = [
        number for number, message in enumerate(chat.messages) if message["role"] == "assistant"
    ]
    said = [turn for turn in answers if turn >= first]
    if not said:
        raise UserError(_without_answer(chat))
    turns = [
        turn
        for turn in said
        if is_trained(chat.messages[turn], f"{chat.where}, message {turn + 1}")
    ]
    if not turns:
        raise UserError(
            f"{chat.where}: by their weight, train or training no answer is to be trained; leave "
            "the row out."
        )
    if settings.train_on == "last":
        turns = turns[-1:]
    chat = fitted_to_template(chat, turns)
    text, spans = render(chat)
    if spans is None:
        spans = [_answer_span(chat, text, turn, turn < turns[-1]) for turn in reversed(turns)]
    elif len(turns) < len(answers):
        spans = _spans_of(chat, turns, answers, spans)
    encoding = chat.tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    tokens = np.array(encoding["input_ids"], dtype=np.int32)
    starts, stops = np.array(encoding["offset_mapping"]).reshape(-1, 2).T
    trained = np.zeros(len(tokens), dtype=bool)
    ends = tuple(chat.tokenizer.convert_ids_to_tokens(end_of_turn(chat.tokenizer)))
    for first_character, beyond in spans:
        start = np.searchsorted(stops, first_character, side="right")
        stop = np.searchsorted(starts, _end_with_closing(chat, text, beyond, ends))
        trained[start:stop] = True
    return tokens, trained


def _spans_of(
    chat: Chat, turns: list[int], answers: list[int], spans: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Those of the `spans` that a template marks which are in the messages `turns`."""

    def marked_before(message: int) -> int:
        if message == answers[0]:
            return 0
        if message == len(chat.messages):
            return len(spans)
        # Text that ends before an answer has earlier ones as the whole has them: by then they are
        # not the last, of which a template may write more.
        return len(render(chat, message)[1] or ())

    following = dict(pairwise([*answers, len(chat.messages)]))
    kept = [(marked_before(turn), marked_before(following[turn])) for turn in turns]
    return [span for start, stop in kept for span in spans[start:stop]]


def _without_answer(chat: Chat) -> str:
    """The message about a conversation in which there is no answer to train."""
    if not chat.messages:
        return f"{chat.where}: the conversation is empty; leave the row out."
    unknown = unknown_roles(chat.messages)
    mend = "leave the row out"
    if unknown:
        last = unknown.rpartition(" ")[2]
        mend = (
            f"say by chat.roles which of {unknown} is the assistant, such as assistant={last}, "
            f"or {mend}"
        )
    return f"{chat.where}: no message is the assistant's; {mend}."


def _end_with_closing(chat: Chat, text: str, beyond: int, ends: tuple[str, ...]) -> int:
    """The end of an answer and of all that closes it, where the answer is trained up to `beyond`.

    Both are counted in characters of `text`.
    """
    if text[:beyond].rstrip().endswith(ends):
        return beyond
    closing = end_of_answer(chat.tokenizer, chat.template).text
    within = max(
        count for count in range(len(closing) + 1) if text.endswith(closing[:count], 0, beyond)
    )
    for rest in (closing[within:], *ends):
        if rest and text.startswith(rest, beyond):
            return beyond + len(rest)
    return beyond


def _answer_span(chat: Chat, whole: str, turn: int, is_earlier: bool) -> tuple[int, int]:
    """Where in `whole` the answer in message `turn` is, for a template that does not mark it.

    The span goes from the end of the text that asks for the message to the token that ends its
    turn. Raises UserError unless `whole` begins with the text of the conversation before the
    message, and with the text of the conversation up to the end of the message.
    """
    end = end_of_answer(chat.tokenizer, chat.template)
    asked = render(chat, turn, asks=True)[0]
    answered = whole
    if turn + 1 < len(chat.messages):
        answered = render(chat, turn + 1)[0]
    answered = answered.removesuffix(end.beyond)
    assert end.token is not None, "use_template has refused such a template"
    last = str(chat.tokenizer.convert_ids_to_tokens(end.token))
    ended = answered.rfind(last, len(asked))
    answered = answered[: ended + len(last)] if ended >= 0 else answered.rstrip()
    for beginning, stop, asks in ((asked, turn, True), (answered, turn + 1, False)):
        if not whole.startswith(beginning):
            raise UserError(
                f"{chat.where}, message {turn + 1}: where it begins and ends cannot be told, "
                f"because the chat template rewrites: {parting(chat, stop, asks)}; give a template "
                'with {% generation %} marks, such as chat.template = "chatml"'
                + (', or set chat.train_on = "last"' if is_earlier else "")
            )
    return len(asked), len(answered)
