"""Turns records into tokens: one record into a document, or a whole source into a cache."""

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, LargeList, List, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from lacuna.config import UserError, explained, logger
from lacuna.config.cores import usable_cores
from lacuna.data.cache import made_once
from lacuna.data.document import Document
from lacuna.data.faults import readable
from lacuna.data.files import BROKEN, RECORD, is_tokens
from lacuna.data.packing import sequence_names
from lacuna.data.sources import Documents
from lacuna.data.tokenizer import rows_of_tokens, tokenize_text, tokenizer_fingerprint
from lacuna.data.workers import pools_forked

_CACHE_VERSION = 5
_CHAT_VERSION = 3  # of how conversations are read
_BYTES_PER_PROCESS = 8 * 2**20
# The columns of a cache, beside those with a value for each sequence of a document.
_FIELDS = {"tokens", "text_bytes", BROKEN, "trained", "ends"}


def add_broken(known: dict[str, None], places: Iterable[str], limit: int) -> None:
    """Adds the places of unreadable records to those that are `known`.

    Warns of the first, the tenth, the hundredth and so on.

    Raises UserError with the first few places when there are more than `limit`.
    """
    before = len(known)
    known |= dict.fromkeys(places)
    examples = "; ".join(islice(known, 3))
    if len(known) > limit:
        raise UserError(
            f"more than {limit} unreadable records, the first: {examples}; mend the data, or raise "
            "data.max_broken_records to skip them."
        )
    if known and (not before or len(str(before)) < len(str(len(known)))):
        logger.warning("unreadable records are left out, %d so far: %s", len(known), examples)


def document_of(
    record: dict[str, Any], number: int | str, source: Documents, tokenizer: PreTrainedTokenizerBase
) -> Document:
    """The document of a source's record of this number; without tokens if it is empty or broken.

    Raises UserError when the record holds tokens and the tokenizer does not know one of them.
    """
    place = record.get(BROKEN) or place_of(number, source)
    if source.chat is not None and not record.get(BROKEN):
        with explained(
            f"{place}: cannot be read", RecursionError, UnicodeEncodeError, mend="leave the row out"
        ):
            row = row_of(record, source)
            if source.asks:
                from lacuna.data.prompts import prompt_document  # an extension, as few need it

                return prompt_document(row, place, tokenizer, source.chat, source.tools)
            if source.preference is None:
                from lacuna.data.chat import encode  # an extension

                return encode(row, place, tokenizer, source.chat)
            from lacuna.data.preferences import judged_document  # an extension, as few need it

            return judged_document(row, number, source, tokenizer)
    value = record[source.column]
    pretokenised = source.column == "input_ids"
    is_readable = is_tokens(value) if pretokenised else isinstance(value, str)
    if not is_readable or not value:
        return Document(np.zeros(0, dtype=np.int32), 0.0, broken=None if is_readable else place)
    if not pretokenised:
        return Document(tokenize_text(tokenizer, value), float(len(value.encode())))
    for token in (min(value), max(value)):
        if not 0 <= token < rows_of_tokens(tokenizer):
            raise UserError(
                f"{place}: holds token {token}, and the tokenizer has none beyond "
                f"{rows_of_tokens(tokenizer) - 1}; the data was made with another tokenizer "
                "(model.tokenizer_path)"
            )
    return Document(np.array(value, dtype=np.int32), float("nan"))


def place_of(number: int | str, source: Documents) -> str:
    """Where in a source the document of this number comes from."""
    if isinstance(number, str):
        return f"{source.name}, {number}"
    return f"{source.name}, row {number // source.answers_per_row + 1}"


def row_of(record: dict[str, Any], source: Documents) -> dict[str, Any]:
    """The columns of a readable record as they were written."""
    if source.column == RECORD:
        return dict(json.loads(record[RECORD]))
    from lacuna.data.messages import unfilled  # an extension

    features = source.dataset.features or {}
    return {
        name: unfilled(value, features.get(name), source.name) for name, value in record.items()
    }


@dataclass(frozen=True)
class TokenTable:
    """The documents of all sources one after the other, read from disk as they are needed.

    `dataset` has a column for each field of a `Document` that its data need, and one for each of
    its sequence columns. `ends` says where each source ends in it. `key` differs for tables of
    other documents or tokens.
    """

    dataset: Dataset
    ends: list[int]
    key: str = ""

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [documents], in tokens."""
        lengths: np.ndarray = pc.list_value_length(self.dataset.data.column("tokens")).to_numpy()
        return lengths

    def document(self, index: int) -> tuple[Document, int]:
        """A document, whose tokens are a view of the file, and the number of its source."""
        row = {name: self.dataset.data.column(name)[index] for name in self.dataset.column_names}
        trained = row.get("trained")
        ends = row.get("ends")
        document = Document(
            row["tokens"].values.to_numpy(),
            row["text_bytes"].as_py(),
            trained=None if trained is None else trained.values.to_numpy(zero_copy_only=False),
            ends=() if ends is None else tuple(ends.as_py()),
            sequence_columns={name: tuple(row[name].as_py()) for name in row.keys() - _FIELDS},
        )
        return document, bisect_right(self.ends, index)


def token_table(
    sources: Sequence[Documents], tokenizer: PreTrainedTokenizerBase, most_broken: int
) -> TokenTable:
    """The tokens of local sources, tokenising those that nobody has tokenised yet.

    Raises UserError when one holds no text, or more than `most_broken` unreadable records, or
    tokens that the tokenizer does not know.
    """
    keys = [_cache_key(source, tokenizer) for source in sources]
    parts = [
        _tokenise_source(source, tokenizer, key) for source, key in zip(sources, keys, strict=True)
    ]
    dataset = datasets.concatenate_datasets(parts)
    broken = pc.drop_null(dataset.data.column(BROKEN)).to_pylist()
    add_broken({}, broken, most_broken)
    table = TokenTable(dataset, list(accumulate(map(len, parts))), Hasher.hash(keys))
    said = f" (the first that is unreadable: {broken[0]})" if broken else ""
    for source, lengths in zip(sources, np.split(table.lengths, table.ends[:-1]), strict=True):
        if not lengths.any():
            raise UserError(
                f"{source.name}: no record holds any text{said}; check data.text_column."
            )
    return table


def _cache_key(source: Documents, tokenizer: PreTrainedTokenizerBase) -> str:
    """A key that differs for other sources, other tokenizers and other settings of tokens."""
    chat = None
    settings = source.chat
    if settings is not None:
        from lacuna.data.template import day_written  # an extension

        chat = [
            _CHAT_VERSION,
            settings.train_on,
            settings.columns,
            settings.roles,
            tokenizer.chat_template,
            tokenizer.special_tokens_map,
            None if source.preference is None else source.preference.loss == "kto",
            source.asks,
            day_written(tokenizer),
        ]
        if source.tools is not None:
            chat.append(source.tools)
    made_of = [
        _CACHE_VERSION,
        source.dataset._fingerprint,
        source.column,
        tokenizer_fingerprint(tokenizer),
        chat,
    ]
    return str(Hasher.hash(made_of))


def _cache_features(source: Documents, tokenizer: PreTrainedTokenizerBase) -> Features:
    """The columns of the cache of a source: as few as its documents need."""
    columns = {
        "tokens": LargeList(Value("uint16" if rows_of_tokens(tokenizer) <= 2**16 else "int32")),
        "text_bytes": Value("float64"),
        BROKEN: Value("string"),
    }
    if source.chat is not None:
        columns["trained"] = LargeList(Value("bool"))
    if source.preference is not None:
        columns["ends"] = List(Value("int64"))
        for name in sequence_names(source.preference.loss):
            columns[name] = List(Value("float32"))
    return Features(columns)


def _as_cache_row(document: Document, features: Features) -> dict[str, Any]:
    """A document as a row of the cache."""
    row = vars(document) | {name: () for name in features.keys() - _FIELDS}
    row |= document.sequence_columns
    if document.trained is None:
        row["trained"] = np.ones(len(document.tokens), dtype=bool)
    return {name: row[name] for name in features}


def _tokenise_source(source: Documents, tokenizer: PreTrainedTokenizerBase, key: str) -> Dataset:
    """The documents of a source, from the cache.

    Of many ranks that ask at once, one makes the cache and the others wait.
    """
    features = _cache_features(source, tokenizer)
    processes = min(usable_cores(), 1 + source.dataset.data.nbytes // _BYTES_PER_PROCESS)

    def write(folder: str) -> None:
        os.mkdir(folder)
        source.dataset.map(
            lambda record, number: _as_cache_row(
                document_of(record, number, source, tokenizer), features
            ),
            with_indices=True,
            remove_columns=source.dataset.column_names,
            new_fingerprint=key,
            desc="tokenising",
            features=features,
            num_proc=processes if processes > 1 else None,
            cache_file_name=os.path.join(folder, "tokens.arrow"),
        )

    with readable(source.name), pools_forked():
        files = sorted(made_once(f"tokens-{key}", write).glob("*.arrow"))
    return datasets.concatenate_datasets([Dataset.from_file(str(file)) for file in files])
