"""Prompts to documents: a prompt, and the token that ends an answer, which alone is a target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.data.chat import end_of_turn
from lacuna.data.document import Document
from lacuna.data.files import BROKEN, RECORD
from lacuna.data.messages import VARIABLES, columns_by_our_names, read_system, refuse_system
from lacuna.data.packing import IGNORED, Batch
from lacuna.data.questions import question_of
from lacuna.data.sources import Documents
from lacuna.data.teacher import annotated
from lacuna.data.tokenize import TokenTable, place_of, row_of
from lacuna.data.tokenizer import tokenize_text

# The columns that rows of JSON lines have, by the fingerprint of the dataset.
_columns: dict[str, set[str]] = {}


@dataclass(frozen=True)
class Prompt:
    """A prompt in a batch.

    Attributes:
        tokens: what the model is given.
        document: the number of its row among those of all sources.
        place: the number of its row of tokens in the batch.
    """

    tokens: list[int]
    document: int
    place: int


def prompt_document(
    row: dict[str, Any],
    where: str,
    tokenizer: PreTrainedTokenizerBase,
    settings: ChatConfig,
    tools: list[dict[str, Any]] | None = None,
) -> Document:
    """The document of the prompt of a row.

    A text in the column prompt is given to the model as it is; or as a message of the user where
    there is a list of `tools`, if an empty one. Messages are given by the chat template, up to
    where the answer begins. Raises UserError where there is neither.
    """
    found = columns_by_our_names(row, settings)
    column = found.get("prompt")
    ends = end_of_turn(tokenizer)
    if not ends:
        raise UserError(
            "model.tokenizer_path: the tokenizer has no token that ends a text, with which "
            "completions could end: give it an eos_token."
        )
    if tools is None and column is not None and isinstance(row[column], str):
        refuse_system(read_system(row, found, where), found, where)
        tokens = tokenize_text(tokenizer, row[column]).tolist()
        if tokens[-1] == tokenizer.eos_token_id and not row[column].endswith(tokenizer.eos_token):
            tokens.pop()
    else:
        question = question_of(row, where, settings, tokenizer, tools)
        if tools is not None and question.chat.variables:
            raise UserError(
                f"{where}, column {VARIABLES}: completions of several turns have replies that are "
                "written without it; leave the column out"
            )
        tokens = tokenizer(question.text, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens:
        raise UserError(f"{where}: the prompt is empty; leave the row out")
    whole = np.array([*tokens, ends[0]], dtype=np.int32)
    return Document(whole, float("nan"), trained=np.arange(len(whole)) == len(tokens))


def with_numbers(
    table: TokenTable, seq_len: int, longest: int
) -> tuple[TokenTable, dict[str, np.ndarray]]:
    """The table of prompts, whose documents know their number; and the kind of that column.

    Raises UserError for prompts that leave no room in a row for the longest completion.
    """
    require_room(table.lengths, seq_len, longest)
    numbered = annotated(
        table, lambda number, document: {"document": np.full(len(document.tokens), number)}
    )
    return numbered, {"document": np.zeros(0, dtype=np.int64)}


def require_room(lengths: np.ndarray, seq_len: int, longest: int) -> None:
    """Raises UserError for prompts that leave no room for the longest completion in a row."""
    asked = lengths[lengths > 0] - 1
    room = seq_len - longest
    long = asked[asked > room]
    if len(long):
        raise UserError(
            f"training.seq_len, rollout.max_tokens: {len(long):,} of {len(asked):,} prompts have "
            f"more than {seq_len} - {longest} = {room} tokens, the longest {long.max():,}: raise "
            "the first, lower the second, or leave these prompts out."
        )


def prompts_of(batch: Batch) -> Iterator[Prompt]:
    """The prompts of a batch, which has at most one in a row; none for rows of padding."""
    columns = (batch.columns[name].numpy() for name in ("input_ids", "labels", "document"))
    for place, (ids, labels, documents) in enumerate(zip(*columns, strict=True)):
        targets = np.flatnonzero(labels != IGNORED)
        if len(targets):
            last = int(targets[0])  # the place before the target
            yield Prompt(ids[: last + 1].tolist(), int(documents[last]), place)


def prompt_of(document: int, table: TokenTable) -> Prompt:
    """The prompt that a document of the table is."""
    tokens = table.document(document)[0].tokens
    return Prompt(tokens[:-1].tolist(), document, place=0)


def rows_of_prompts(
    documents: Sequence[int], table: TokenTable, sources: Sequence[Documents]
) -> list[tuple[dict[str, Any], str, int]]:
    """The row of data that each prompt is from, where it is, and the number of its source.

    The rows of a source are read at once.
    """
    numbers = np.searchsorted(table.ends, documents, side="right").tolist()
    found: dict[int, tuple[dict[str, Any], str, int]] = {}
    for number in {*numbers}:
        source = sources[number]
        first = table.ends[number - 1] if number else 0
        pairs = zip(documents, numbers, strict=True)
        places = [document - first for document, own in pairs if own == number]
        columns = source.dataset[places]
        for place, values in zip(places, zip(*columns.values(), strict=True), strict=True):
            row = row_of(dict(zip(columns, values, strict=True)), source)
            found[first + place] = (row, place_of(place, source), number)
    return [found[document] for document in documents]


def columns_of_rows(source: Documents) -> set[str]:
    """The columns that rows of a source have; those of JSON lines may have different ones.

    To find these all rows are read, once in a process.
    """
    if source.column != RECORD:
        return {*source.dataset.column_names}
    key = source.dataset._fingerprint
    if key not in _columns:
        records = (record for record in source.dataset if not record[BROKEN])
        _columns[key] = {name for record in records for name in row_of(record, source)}
    return _columns[key]
