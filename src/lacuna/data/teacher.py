"""A teacher's likeliest tokens on disk: what it said at each trained token of a set of documents.

A folder holds, for every token that is trained, the ids of the k likeliest tokens in its place,
their log-probabilities and last that of all other tokens together. Log-probabilities are float32,
so that a run learns from them what it would learn from the teacher itself: 8k + 4 bytes a token.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from lacuna.config import UserError, explained, logger
from lacuna.data.cache import fingerprint, made_once
from lacuna.data.document import Document
from lacuna.data.sources import Documents
from lacuna.data.tokenize import TokenTable, place_of

SETTING = "distillation.teacher_logprobs"
DESCRIPTION = "teacher.json"
IDS = "ids.npy"
LOGPROBS = "logprobs.npy"
DOCUMENTS = "documents.npy"
FORMAT = 1
# A document's key, and the first of its rows in the other files.
_ENTRY = np.dtype([("key", np.uint64), ("first", np.int64)])


@dataclass(frozen=True)
class AnnotatedTable(TokenTable):
    """A table of tokens whose documents have columns, made of their number and themselves."""

    columns_of: Callable[[int, Document], Mapping[str, np.ndarray]] = lambda number, document: {}

    def document(self, index: int) -> tuple[Document, int]:
        """A document with its columns, and its source."""
        document, source = super().document(index)
        return replace(document, columns=self.columns_of(index, document)), source


def annotated(
    table: TokenTable, columns_of: Callable[[int, Document], Mapping[str, np.ndarray]]
) -> AnnotatedTable:
    """The table with columns of its documents."""
    return AnnotatedTable(table.dataset, table.ends, table.key, columns_of)


def row_counts(table: TokenTable) -> np.ndarray:
    """How many rows each document has in the files, int64 [documents]: one a trained token."""
    if "trained" not in table.dataset.column_names:
        return table.lengths
    documents = (table.document(number)[0] for number in range(len(table.lengths)))
    counts = (
        int(rows_of(document, 1)[-1]) if document.tokens.size else 0 for document in documents
    )
    return np.fromiter(counts, np.int64, len(table.lengths))


def rows_of(document: Document, first: int) -> np.ndarray:
    """The row of each token of a document whose rows begin with the `first`, int64 [n].

    What it says of tokens that are not trained is of no meaning.
    """
    if document.trained is None:
        return first + np.arange(len(document.tokens))
    return first - 1 + np.cumsum(document.trained)


def document_keys(table: TokenTable) -> np.ndarray:
    """What tells documents apart, by their tokens and which are trained, uint64 [documents].

    The keys are computed once and kept in the cache.
    """

    def write(file: str) -> None:
        numbers = range(len(table.lengths))
        keys = (_key(table.document(number)[0]) for number in numbers)
        np.save(file, np.fromiter(keys, np.uint64, len(numbers)))

    keys: np.ndarray = np.load(made_once(f"documents-{table.key}.npy", write))
    return keys


def _key(document: Document) -> int:
    digest = hashlib.blake2b(document.tokens.astype(np.int32).tobytes(), digest_size=8)
    if document.trained is not None:
        digest.update(document.trained.tobytes())
    return int.from_bytes(digest.digest(), "little")


def vocabulary_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """What tells the vocabulary of a tokenizer from others."""
    return str(Hasher.hash(sorted(tokenizer.get_vocab().items())))


def create_files(folder: str, rows: int, top_k: int) -> None:
    """Makes the files of ids and log-probabilities in a folder, with room on the disk for all rows.

    Raises OSError where there is none: without it, writing to them later would end the process.
    """
    for name, dtype, width in ((IDS, np.int32, top_k), (LOGPROBS, np.float32, top_k + 1)):
        path = os.path.join(folder, name)
        np.lib.format.open_memmap(path, "w+", dtype, (rows, width)).flush()
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))


def describe_files(
    folder: str, table: TokenTable, firsts: np.ndarray, told: Mapping[str, object]
) -> None:
    """Completes the files by the keys of the documents, checksums, and what else is `told`."""
    entries = np.zeros(len(firsts), _ENTRY)
    entries["key"] = document_keys(table)
    entries["first"] = firsts
    np.save(os.path.join(folder, DOCUMENTS), np.sort(entries, order="key"))
    sums = {name: fingerprint([os.path.join(folder, name)]) for name in (IDS, LOGPROBS, DOCUMENTS)}
    with open(os.path.join(folder, DESCRIPTION), "w") as file:
        json.dump({"format": FORMAT, **told, "files": sums}, file, indent=1)


def read_description(folder: str) -> dict[str, Any]:
    """What is told of the files in a folder, which are whole.

    Raises UserError where there are none, or they are not what was written.
    """
    write = "write it with: lacuna teach RUN.toml"
    if not os.path.isdir(folder):
        cause = f"there is no folder {folder}"
        if os.path.isdir(f"{folder}.unfinished"):
            cause = f"lacuna teach did not come to the end of {folder}"
        raise UserError(f"{SETTING}: {cause}; {write}")
    mend = f"remove it, and {write}"
    damaged = f"{SETTING}: {folder} is damaged, or is no folder of lacuna teach"
    kinds = (OSError, ValueError, KeyError, TypeError, AttributeError)
    with explained(damaged, *kinds, mend=mend):
        with open(os.path.join(folder, DESCRIPTION)) as file:
            told: dict[str, Any] = json.load(file)
        written_as = told["format"]
        found = {name: fingerprint([os.path.join(folder, name)]) for name in told["files"]}
        changed = [name for name, kept in told["files"].items() if found[name] != kept]
    if changed:
        raise UserError(f"{damaged}: {', '.join(changed)} is not as it was written; {mend}")
    if written_as != FORMAT:
        raise UserError(
            f"{SETTING}: {folder} has format {written_as}, and this lacuna reads {FORMAT}; {mend}"
        )
    return told


def with_teacher(
    table: TokenTable,
    sources: Sequence[Documents],
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[TokenTable, dict[str, np.ndarray]]:
    """The table, its documents with what a teacher said of them; and the kinds of their columns.

    These are teacher_ids [n, k] and teacher_logprobs [n, k + 1]. Raises UserError for files that
    are damaged, or of another tokenizer or of other documents.
    """
    told = read_description(folder)
    if told["vocabulary"] != vocabulary_key(tokenizer):
        raise UserError(
            f"{SETTING}: {folder} was made with another tokenizer than the model's; set "
            "model.tokenizer_path to that of the teacher, or write it anew with: lacuna teach "
            "RUN.toml"
        )
    firsts = _firsts(table, sources, folder)
    ids = np.load(os.path.join(folder, IDS), mmap_mode="r")
    logprobs = np.load(os.path.join(folder, LOGPROBS), mmap_mode="r")
    logger.info("learning from the %d likeliest tokens of %s", ids.shape[1], told["teacher"])
    stored = {"teacher_ids": ids, "teacher_logprobs": logprobs}

    def columns_of(number: int, document: Document) -> Mapping[str, np.ndarray]:
        first, count = int(firsts[number]), len(document.tokens)
        if document.trained is None:
            return {name: rows[first : first + count] for name, rows in stored.items()}
        trained = document.trained
        columns = {}
        for name, rows in stored.items():
            columns[name] = np.zeros((count, rows.shape[1]), rows.dtype)
            columns[name][trained] = rows[first : first + np.count_nonzero(trained)]
        return columns

    return annotated(table, columns_of), {name: rows[:0] for name, rows in stored.items()}


def _firsts(table: TokenTable, sources: Sequence[Documents], folder: str) -> np.ndarray:
    """The first row of each document in the files of a folder, int64 [documents].

    Raises UserError for documents that are not in them.
    """
    entries = np.load(os.path.join(folder, DOCUMENTS))
    keys = document_keys(table)
    places = np.searchsorted(entries["key"], keys).clip(max=max(len(entries) - 1, 0))
    found = entries[places]
    # In a document of one token nothing is predicted.
    missing = np.flatnonzero((found["key"] != keys) & (table.lengths > 1))
    if len(missing):
        first = int(missing[0])
        source = bisect_right(table.ends, first)
        within = first - ([0, *table.ends][source])
        raise UserError(
            f"{SETTING}: {len(missing):,} of {len(keys):,} documents are not in {folder}, the "
            f"first: {place_of(within, sources[source])}; give the data that it was made of, or "
            "write it anew with: lacuna teach RUN.toml"
        )
    firsts: np.ndarray = found["first"]
    return firsts
