"""A source of the configuration to an opened dataset with one column of documents."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetBuilder, DatasetDict, Features, IterableDataset, List, ReadInstruction, Value
from datasets.exceptions import DatasetGenerationError
from datasets.load import infer_module_for_data_files_list
from fsspec.core import url_to_fs

from lacuna.config import UserError
from lacuna.config.documents import DataConfig, Source
from lacuna.data import corpus, files
from lacuna.data.retry import with_retries

_READERS = {"json", "parquet", "csv", "text", "arrow"}
_READER_VERSION = 2
_COLUMNS = ("text", "content", "input_ids")
_STREAMED_SHARDS = 64


@dataclass(frozen=True)
class Documents:
    """An opened source: `column` of `dataset` holds a text per record, or, called input_ids, its tokens.

    A streaming source also has `shard_sizes`: how big each of the dataset's shards is, in a unit of their own.
    """

    name: str
    dataset: Dataset | IterableDataset
    column: str
    shard_sizes: tuple[int, ...] = ()


def open_source(source: Source, data: DataConfig, streaming: bool) -> Documents:
    """Open a source of documents.

    Raises UserError when there is no such dataset, file, split or column, or nothing in it.
    """
    parts = [source.name, source.dir, ",".join(source.files), f"split {source.split}"]
    name = f"{source.dataset} ({', '.join(part for part in parts if part)})"
    try:
        opened = _open(source, name, data, streaming)
    except (DatasetGenerationError, FileNotFoundError, ValueError, ConnectionError) as error:
        cause = isinstance(error, DatasetGenerationError) and error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from None
        reason = str(cause).strip().partition("\n")[0]
        raise UserError(
            f"{name}: cannot be opened: {reason}; check data.dataset (or validation.dataset), its name, split, "
            "folder and files, and whether the Hub can be reached"
        ) from error
    if not streaming and not len(opened.dataset):
        raise UserError(f"{name}: holds no documents; check data.dataset_split, data.data_dir and data.data_files")
    return opened


def _open(source: Source, name: str, data: DataConfig, streaming: bool) -> Documents:
    split, bracket, _ = source.split.partition("[")
    if bracket and streaming:
        raise UserError(
            f"{name}: a stream has no length to take a part of; give a whole split, or set data.streaming=false"
        )
    folder = Path(source.dataset, source.dir or "")
    if source.dataset == corpus.NAME:
        return _from_files(corpus.stdlib_files(), "text", source, name, data, streaming)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(folder))
        dataset: Any = _part(saved if isinstance(saved, DatasetDict) else {split: saved}, source.split)
        if streaming:
            dataset = dataset.to_iterable_dataset(min(_STREAMED_SHARDS, len(dataset)))
    else:
        builder = with_retries(lambda: _builder(source, split, name), data.retries, name)
        if builder.repo_id is None and builder.name in ("json", "text"):
            return _from_files(builder.config.data_files, builder.name, source, name, data, streaming)
        if not streaming:
            with_retries(builder.download_and_prepare, data.retries, name)
        load = builder.as_streaming_dataset if streaming else builder.as_dataset
        dataset = with_retries(lambda: load(source.split), data.retries, name)
    columns = dataset.column_names or with_retries(lambda: list(next(iter(dataset), {})), data.retries, name)
    column = _choose_column(columns, data.text_column, name)
    return Documents(name, dataset.select_columns([column]), column, (1,) * dataset.num_shards if streaming else ())


def _builder(source: Source, split: str, name: str) -> DatasetBuilder:
    """What `datasets` makes of a source: its files by split, and the kind of their records."""
    kind, options = infer_module_for_data_files_list([source.dataset])
    if Path(source.dataset).is_dir() or kind is None:
        if source.dataset in _READERS and not source.files:
            raise UserError(f"{name}: a reader of local files needs data.data_files")
        if source.dataset.startswith((".", "/", "~")) and not Path(source.dataset).is_dir():
            raise UserError(f"{name}: no such file or folder; check data.dataset")
        chosen = {split: list(source.files)} if source.files else None
        return datasets.load_dataset_builder(source.dataset, source.name, data_dir=source.dir, data_files=chosen)
    return datasets.load_dataset_builder(kind, data_files={split: [source.dataset]}, **options)


def _from_files(
    by_split: dict[str, list[str]], kind: str, source: Source, name: str, data: DataConfig, streaming: bool
) -> Documents:
    """Local files of JSON or text, by the reader that goes on after a bad line, which that of `datasets` does not."""
    split = source.split.partition("[")[0]
    found = by_split.get(split)
    if not found:
        raise UserError(f"{name}: no files of this split; there are {', '.join(map(str, by_split))}")
    column = _choose_column(files.columns_of(found, kind), data.text_column if kind == "json" else None, name)
    value = List(Value("int64")) if column == "input_ids" else Value("large_string")
    features = Features({column: value, files.BROKEN: Value("string")})
    arguments = {"files": found, "kind": kind, "column": column, "version": _READER_VERSION}
    opener = IterableDataset if streaming else Dataset
    read = partial(opener.from_generator, files.read_records, features=features, gen_kwargs=arguments)
    dataset = with_retries(read, data.retries, name)
    if streaming:
        return Documents(name, dataset, column, tuple(url_to_fs(file)[0].size(file) for file in found))
    return Documents(name, _part({split: dataset}, source.split), column)


def _part(splits: dict[str, Dataset], split: str) -> Dataset:
    """The split, or the part of it, that such as train or train[:90%] names."""
    part = ReadInstruction.from_spec(split).to_absolute({name: len(dataset) for name, dataset in splits.items()})[0]
    whole = splits[part.splitname]
    return whole.select(range(part.from_ or 0, len(whole) if part.to is None else part.to))


def _choose_column(columns: list[str], wanted: str | None, name: str) -> str:
    candidates = (wanted,) if wanted else _COLUMNS
    for candidate in candidates:
        if candidate in columns:
            return candidate
    raise UserError(
        f"{name}: no column {' or '.join(candidates)}; it has {', '.join(columns)}; name one by data.text_column"
    )
