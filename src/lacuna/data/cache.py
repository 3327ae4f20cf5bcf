"""Local documents tokenised once into an Arrow cache that all ranks, workers and later runs share."""

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, LargeList, Value
from datasets.fingerprint import Hasher
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from lacuna.config import UserError
from lacuna.data.files import BROKEN
from lacuna.data.packing import Document
from lacuna.data.sources import Documents
from lacuna.data.tokenize import BrokenRecords, document_of, tokenizer_fingerprint

_VERSION = 2
_BYTES_PER_PROCESS = 8 * 2**20


@dataclass(frozen=True)
class TokenTable:
    """The tokens of a source's documents, read from disk as they are needed.

    `dataset` holds of each document its tokens (none where it is empty or broken) as input_ids and its text's
    UTF-8 bytes (nan where only tokens are known) as bytes.
    """

    dataset: Dataset

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [documents], in tokens."""
        return pc.list_value_length(self.dataset.data.column("input_ids")).to_numpy()

    @cached_property
    def text_bytes(self) -> np.ndarray:
        """float64 [documents], UTF-8 bytes of each text; nan where only its tokens are known."""
        return self.dataset.data.column("bytes").to_numpy()

    def document(self, index: int) -> Document:
        """A document, its tokens a view of the file."""
        return Document(self.dataset.data.column("input_ids")[index].values.to_numpy(), float(self.text_bytes[index]))


def tokenised(source: Documents, tokenizer: PreTrainedTokenizerBase, broken: BrokenRecords) -> TokenTable:
    """The tokens of a local source, tokenising it unless somebody already has.

    Of many ranks that ask at once, one does the work and the others wait for it at a file lock. Broken records
    are counted into `broken`. Raises UserError when there are too many or nothing else, or tokens the tokenizer does
    not know.
    """
    key = Hasher.hash([_VERSION, source.dataset._fingerprint, source.column, tokenizer_fingerprint(tokenizer)])
    folder = Path(datasets.config.HF_DATASETS_CACHE, "lacuna", key)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = LargeList(Value("uint16" if len(tokenizer) <= 2**16 else "int32"))
    processes = min(usable_cores(), math.ceil(source.dataset.data.nbytes / _BYTES_PER_PROCESS))
    with FileLock(folder.with_suffix(".lock")):
        dataset = source.dataset.map(
            _tokenise, with_indices=True, remove_columns=source.dataset.column_names, new_fingerprint=key,
            features=Features({"input_ids": tokens, "bytes": Value("float64"), BROKEN: Value("string")}),
            num_proc=processes if processes > 1 else None, cache_file_name=str(folder / "tokens.arrow"),
            load_from_cache_file=True, fn_kwargs={"source": source, "tokenizer": tokenizer}, desc="tokenising",
        )  # fmt: skip
    broken.add(pc.drop_null(dataset.data.column(BROKEN)).to_pylist())
    table = TokenTable(dataset)
    if not table.lengths.any():
        raise UserError(f"{source.name}: no record holds any text; check data.text_column")
    return table


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tokenise(
    record: dict[str, Any], index: int, source: Documents, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    document = document_of(source, record, f"document {index}", tokenizer)
    return {"input_ids": document.tokens, "bytes": document.text_bytes, BROKEN: document.broken}
