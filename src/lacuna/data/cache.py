"""Local documents tokenised once into an Arrow cache that all ranks, workers and later runs share."""

import hashlib
import json
import logging
import math
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, LargeList, Value
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from lacuna.data.files import BROKEN
from lacuna.data.sources import Documents
from lacuna.data.tokenize import BrokenRecords, checked_tokens, tokenize_texts, tokenizer_fingerprint

_LOG = logging.getLogger(__name__)
_VERSION = 1
_BYTES_PER_PROCESS = 32 * 2**20


@dataclass(frozen=True)
class TokenTable:
    """The tokens of a source's documents, read from disk as they are needed.

    `column` of `dataset` holds a list of tokens per document; `folder` the number of tokens of each (lengths.npy)
    and, unless it came tokenised, the UTF-8 bytes of its text (bytes.npy).
    """

    folder: Path
    dataset: Dataset

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [documents]; 0 where a record is empty or broken."""
        return np.load(self.folder / "lengths.npy", mmap_mode="r")

    @cached_property
    def _bytes(self) -> np.ndarray | None:
        path = self.folder / "bytes.npy"
        return np.load(path, mmap_mode="r") if path.exists() else None

    @cached_property
    def _chunks(self) -> tuple[list[pa.Array], np.ndarray]:
        chunks = self.dataset.data.column("input_ids").chunks
        return chunks, np.cumsum([0] + [len(chunk) for chunk in chunks])

    def tokens(self, index: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a document, fewer where it ends before."""
        chunks, starts = self._chunks
        number = int(np.searchsorted(starts, index, side="right")) - 1
        values = chunks[number][index - int(starts[number])].values
        return values.slice(start, stop - start).to_numpy(zero_copy_only=False)

    def text_bytes(self, index: int) -> float:
        """UTF-8 bytes of a document's text; nan when only its tokens are known."""
        return float("nan") if self._bytes is None else float(self._bytes[index])

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "dataset")}


def tokenised(source: Documents, tokenizer: PreTrainedTokenizerBase, broken: BrokenRecords) -> TokenTable:
    """The tokens of a local source, tokenising it unless somebody already has.

    Of many ranks that ask at once, one does the work and the others wait for it at a file lock. Broken records
    are counted into `broken`. Raises UserError when there are too many, or tokens the tokenizer does not know.
    """
    identity = [_VERSION, source.dataset._fingerprint, source.column, tokenizer_fingerprint(tokenizer)]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "lacuna" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _write(source, tokenizer, folder, key)
    table = TokenTable(folder, source.dataset) if source.pretokenised else _open(folder)
    places = json.loads((folder / "done.json").read_text())[BROKEN]
    for place in places:
        broken.add(place)
    return table


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open(folder: Path) -> TokenTable:
    parts = [Dataset.from_file(str(path)) for path in sorted(folder.glob("*.arrow"))]
    return TokenTable(folder, datasets.concatenate_datasets(parts))


def _write(source: Documents, tokenizer: PreTrainedTokenizerBase, folder: Path, key: str) -> None:
    """Fill a cache folder; done.json comes last and says that all of it is there."""
    if source.pretokenised:
        column = source.dataset.data.column(source.column)
        for chunk in column.chunks:
            checked_tokens(chunk.flatten().to_numpy(zero_copy_only=False), len(tokenizer), source.name)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        empty = np.flatnonzero(pc.is_null(column).to_numpy())
        places = [f"{source.name}, document {index}" for index in empty]
    else:
        _LOG.info("tokenising %s, once, into %s", source.name, folder)
        _map(source, tokenizer, folder, key)
        data = _open(folder).dataset.data
        lengths = pc.list_value_length(data.column("input_ids")).to_numpy()
        np.save(folder / "bytes.npy", data.column("bytes").to_numpy())
        places = pc.drop_null(data.column(BROKEN)).to_pylist()
    np.save(folder / "lengths.npy", lengths.astype(np.int64))
    (folder / "done.json").write_text(json.dumps({BROKEN: places, "source": source.name}))


def _map(source: Documents, tokenizer: PreTrainedTokenizerBase, folder: Path, key: str) -> None:
    kind = "uint16" if len(tokenizer) <= 2**16 else "int32"
    features = Features({"input_ids": LargeList(Value(kind)), "bytes": Value("int64"), BROKEN: Value("string")})
    processes = min(usable_cores(), math.ceil(source.dataset.data.nbytes / _BYTES_PER_PROCESS))
    source.dataset.map(
        _tokenise_batch, batched=True, with_indices=True, remove_columns=source.dataset.column_names,
        features=features, num_proc=processes if processes > 1 else None, load_from_cache_file=False,
        cache_file_name=str(folder / "tokens.arrow"), new_fingerprint=key, desc="tokenising",
        fn_kwargs={"name": source.name, "column": source.column, "tokenizer": tokenizer, "kind": kind},
    )  # fmt: skip


def _tokenise_batch(
    batch: dict[str, list], indices: list[int], name: str, column: str, tokenizer: PreTrainedTokenizerBase, kind: str
) -> pa.Table:
    texts = [text or "" for text in batch[column]]
    reasons = batch.get(BROKEN, [None] * len(texts))
    places = [
        (reason or f"{name}, document {index}") if text is None else None
        for text, reason, index in zip(batch[column], reasons, indices, strict=True)
    ]
    present = [text for text in texts if text]
    tokens = iter(tokenize_texts(tokenizer, present) if present else [])
    arrays = [next(tokens) if text else np.zeros(0, dtype=np.int32) for text in texts]
    offsets = np.concatenate(([0], np.cumsum([len(array) for array in arrays])))
    values = np.concatenate(arrays).astype(kind)
    return pa.table({
        "input_ids": pa.LargeListArray.from_arrays(offsets, values),
        "bytes": [len(text.encode()) for text in texts],
        BROKEN: pa.array(places, type=pa.string()),
    })  # fmt: skip
