"""A source of the configuration to an opened dataset with one column of documents."""

from collections.abc import Callable
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any, TypeVar

import datasets
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value
from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns
from datasets.exceptions import DatasetGenerationError

from lacuna.config import UserError
from lacuna.config.documents import DataConfig, Source
from lacuna.data import corpus, files
from lacuna.data.files import BROKEN, File
from lacuna.data.retry import with_retries

Result = TypeVar("Result")

_READERS = {"json", "parquet", "csv", "text", "arrow"}
_READER_VERSION = 1
_COLUMNS = ("text", "content", "input_ids")


@dataclass(frozen=True)
class Documents:
    """An opened source: `column` of `dataset` holds a text per record, or tokens when `pretokenised`.

    A streaming source also has `shard_sizes`: how big each of the dataset's shards is, in a unit of their own.
    """

    name: str
    dataset: Dataset | IterableDataset
    column: str
    shard_sizes: tuple[int, ...] = ()

    @property
    def pretokenised(self) -> bool:
        return self.column == "input_ids"

    @property
    def streaming(self) -> bool:
        return isinstance(self.dataset, IterableDataset)


def open_source(source: Source, data: DataConfig, streaming: bool) -> Documents:
    """Open a source of documents.

    Raises UserError when there is no such dataset, file, split or column, or nothing in it.
    """
    name = describe(source)
    opened = _with_user_errors(lambda: _open(source, name, data, streaming), name)
    if not streaming and not len(opened.dataset):
        raise UserError(f"{name}: holds no documents; check data.dataset_split, data.data_dir and data.data_files")
    return opened


def describe(source: Source) -> str:
    """How messages and logs call a source."""
    parts = [source.name, source.dir, ",".join(source.files), f"split {source.split}"]
    return f"{source.dataset} ({', '.join(part for part in parts if part)})"


def _with_user_errors(action: Callable[[], Result], name: str) -> Result:
    try:
        return action()
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(f"{name}: cannot be read: {error.__cause__ or error}") from error
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{name}: cannot be opened: {reason}; check data.dataset (or validation.dataset), its name, split, "
            "folder and files, and whether the Hub can be reached"
        ) from error


def _open(source: Source, name: str, data: DataConfig, streaming: bool) -> Documents:
    folder = Path(source.dataset, source.dir or "")
    if source.dataset == corpus.NAME:
        found = [file for path in corpus.stdlib_files(source.split) for file in files.find_files(str(path))]
        return _from_lines(found, "text", name, source, data, streaming)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _from_saved_folder(folder, name, source, data, streaming)
    found = _local_files(source, folder, name)
    if found is None:
        return _from_library(source.dataset, {"data_files": list(source.files) or None}, name, source, data, streaming)
    kind = source.dataset if source.dataset in _READERS else _only_kind(found, name)
    if kind in files.LINE_KINDS:
        return _from_lines(found, kind, name, source, data, streaming)
    base, _ = _split_and_slice(source.split)
    arguments = {"data_files": {base: [file.path for file in found]}}
    return _from_library(kind, arguments, name, source, data, streaming)


def _local_files(source: Source, folder: Path, name: str) -> list[File] | None:
    """The files of a source that lies in files, None when it is a dataset of the Hub."""
    is_file = has_magic(source.dataset) or "://" in source.dataset or files.kind_of(source.dataset) is not None
    if source.dataset in _READERS and not source.files:
        raise UserError(f"{name}: a reader of local files needs data.data_files")
    if source.dataset in _READERS:
        patterns = [str(Path(source.dir or "", file)) if "://" not in file else file for file in source.files]
    elif folder.is_dir() and source.files:
        patterns = [str(folder / file) for file in source.files]
    elif folder.is_dir():
        return _files_of_split(folder, source, name)
    elif is_file or folder.is_file():
        patterns = [source.dataset]
    elif source.dataset.startswith((".", "/", "~")):
        raise UserError(f"{name}: no such file or folder; check data.dataset")
    else:
        return None
    return [file for pattern in patterns for file in files.find_files(pattern)]


def _files_of_split(folder: Path, source: Source, name: str) -> list[File] | None:
    """The files of one split of a folder by the Hub's habits of naming; None when it has a dataset card's settings."""
    if source.name is not None:
        return None
    try:
        splits = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except EmptyDatasetError:
        raise UserError(f"{name}: the folder holds no data files") from None
    base, _ = _split_and_slice(source.split)
    if base not in splits:
        raise UserError(f"{name}: no files of this split; the folder has {', '.join(map(str, splits))}")
    paths = [path for path in splits[base] if files.kind_of(path) is not None]
    if not paths:
        raise UserError(f"{name}: no files of a known kind; known are {', '.join(sorted(files.KINDS))}")
    return [file for path in paths for file in files.find_files(path)]


def _only_kind(found: list[File], name: str) -> str:
    kinds = {files.kind_of(file.path) for file in found}
    if len(kinds) != 1 or None in kinds:
        raise UserError(
            f"{name}: the files are of {'several kinds' if None not in kinds else 'an unknown kind'}; choose files of "
            f"one kind by data.data_files; known are {', '.join(sorted(files.KINDS))}, also with "
            f"{', '.join(sorted(files.COMPRESSIONS))}"
        )
    return str(kinds.pop())


def _from_lines(
    found: list[File], kind: str, name: str, source: Source, data: DataConfig, streaming: bool
) -> Documents:
    found = [file for file in found if file.size]
    if not found:
        raise UserError(f"{name}: all files are empty")
    column = _choose_column(files.columns_of(found, kind), data.text_column if kind == "json" else None, name)
    features = Features({column: List(Value("int64")) if column == "input_ids" else Value("large_string"),
                         BROKEN: Value("string")})  # fmt: skip
    arguments = {"files": found, "kind": kind, "column": column, "version": _READER_VERSION}
    if streaming:
        _refuse_slice(source, name)
        stream = IterableDataset.from_generator(files.read_records, features=features, gen_kwargs=arguments)
        return Documents(name, stream, column, tuple(file.size for file in found))
    dataset = with_retries(
        lambda: Dataset.from_generator(files.read_records, features=features, gen_kwargs=arguments), data.retries, name
    )
    return Documents(name, _sliced(dataset, source.split), column)


def _from_saved_folder(folder: Path, name: str, source: Source, data: DataConfig, streaming: bool) -> Documents:
    dataset: Any = datasets.load_from_disk(str(folder))
    if isinstance(dataset, DatasetDict):
        base, _ = _split_and_slice(source.split)
        if base not in dataset:
            raise UserError(f"{name}: no such split; the folder has {', '.join(map(str, dataset))}")
        dataset = dataset[base]
    dataset = _sliced(dataset, source.split)
    column = _choose_column(dataset.column_names, data.text_column, name)
    if not streaming:
        return Documents(name, dataset.select_columns([column]), column)
    shards = min(64, len(dataset))
    return Documents(name, dataset.select_columns([column]).to_iterable_dataset(shards), column, (1,) * shards)


def _from_library(
    path: str, arguments: dict[str, Any], name: str, source: Source, data: DataConfig, streaming: bool
) -> Documents:
    if streaming:
        _refuse_slice(source, name)
    dataset: Any = with_retries(
        lambda: datasets.load_dataset(
            path, source.name, data_dir=source.dir if path == source.dataset else None, split=source.split,
            streaming=streaming, **arguments,
        ), data.retries, name,
    )  # fmt: skip
    columns = dataset.column_names or with_retries(lambda: list(next(iter(dataset), {})), data.retries, name)
    column = _choose_column(columns, data.text_column, name)
    sizes = (1,) * dataset.num_shards if streaming else ()
    return Documents(name, dataset.select_columns([column]), column, sizes)


def _choose_column(columns: list[str], wanted: str | None, name: str) -> str:
    candidates = (wanted,) if wanted else _COLUMNS
    for candidate in candidates:
        if candidate in columns:
            return candidate
    raise UserError(
        f"{name}: no column {' or '.join(candidates)}; it has {', '.join(columns)}; name one by data.text_column"
    )


def _split_and_slice(split: str) -> tuple[str, str]:
    base, bracket, rest = split.partition("[")
    return base, bracket + rest


def _sliced(dataset: Dataset, split: str) -> Dataset:
    """The part of a dataset that a split such as train[:90%] names."""
    _, slice_ = _split_and_slice(split)
    if not slice_:
        return dataset
    bounds = datasets.ReadInstruction.from_spec("train" + slice_).to_absolute({"train": len(dataset)})[0]
    return dataset.select(range(bounds.from_ or 0, len(dataset) if bounds.to is None else bounds.to))


def _refuse_slice(source: Source, name: str) -> None:
    if "[" in source.split:
        raise UserError(
            f"{name}: a stream has no length to take a part of; give a whole split, or set data.streaming=false"
        )
