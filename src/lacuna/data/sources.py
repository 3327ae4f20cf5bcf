"""A source of the configuration, opened: a dataset with one column of documents."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, DatasetBuilder, Features, IterableDataset, List, NamedSplit, Value
from datasets.config import REPOCARD_FILENAME
from datasets.exceptions import DatasetGenerationError
from datasets.load import infer_module_for_data_files_list
from datasets.packaged_modules.generator.generator import Generator
from fsspec.core import url_to_fs
from yaml import YAMLError

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import BUILT_IN, READERS, DataConfig, Source
from lacuna.config.objectives import PreferenceConfig
from lacuna.data import files
from lacuna.data.columns import columns_of_rows, first_columns, used_columns
from lacuna.data.faults import damage_message, is_damage, with_retries
from lacuna.data.folders import differing_types_explained, refuse_unread_files

_READER_VERSION = 2


@dataclass(frozen=True)
class Documents:
    """An opened source.

    Attributes:
        name: what it is called in messages.
        dataset: its records.
        column: which of their columns holds the text, or, called input_ids, its tokens; or the
            whole record as JSON, called `files.RECORD`.
        shard_sizes: of a stream, how big each of the dataset's shards is, in a unit of their own.
        chat: how its records become tokens, if they are conversations or preferences.
        files: the local files that it is made of.
        preference: what is learnt from its records, if they are preferences.
        answers_per_row: how many documents a row becomes; `dataset` holds the row as often.
        asks: whether its documents are prompts, whose rows have what completions are judged by.
        tools: what prompts tell of, where all of them are conversations; None where they need not.
    """

    name: str
    dataset: Dataset | IterableDataset
    column: str
    shard_sizes: tuple[int, ...] = ()
    chat: ChatConfig | None = None
    files: tuple[str, ...] = ()
    preference: PreferenceConfig | None = None
    answers_per_row: int = 1
    asks: bool = False
    tools: list[dict[str, Any]] | None = None

    def columns_of(self, row: Collection[str]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Our names of the columns of a row that are read; and the data's name of each, by ours."""
        if self.chat is None:
            return (self.column,), {self.column: self.column}
        return columns_of_rows(row, self.chat, self.preference)


def open_source(
    source: Source,
    settings: DataConfig,
    chat: ChatConfig | None = None,
    preference: PreferenceConfig | None = None,
    numbers: Sequence[str] = (),
    whole: bool = False,
) -> Documents:
    """Opens a source of texts, of conversations or of preferences, with its columns of `numbers`.

    Its records hold the columns that are used, or with `whole` every column. Raises UserError when
    there is no such dataset, file, split or column, or nothing in it.
    """
    parts = [source.name, source.dir, ",".join(source.files), f"split {source.split}"]
    name = f"{source.dataset} ({', '.join(part for part in parts if part)})"

    def attempt() -> list[Documents]:
        return [_open_documents(name, source, settings, chat, preference, numbers, whole)]

    try:
        return next(with_retries(attempt, settings.retries, name))
    except (
        UserError,
        DatasetGenerationError,
        OSError,
        ValueError,
        RuntimeError,
        YAMLError,
    ) as error:
        cause: BaseException = error
        if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
            cause = error.__cause__
        raise UserError(f"{name}: {_why_not_opened(cause, numbers)}") from error


def _why_not_opened(cause: BaseException, numbers: Sequence[str]) -> str:
    """Why a source with columns of `numbers` cannot be opened, and what to do."""
    if is_damage(cause):
        return damage_message(cause)
    said = " ".join(str(cause).split())
    if isinstance(cause, UserError):
        return said
    mend = ("name a column of numbers by curriculum.difficulty_column, or " if numbers else "") + (
        "check data.dataset or validation.dataset, name, split, folder, files, and if the Hub can "
        "be reached"
    )
    return f"cannot be opened: {said}; {mend}"


def _open_documents(
    name: str,
    source: Source,
    settings: DataConfig,
    chat: ChatConfig | None,
    preference: PreferenceConfig | None,
    numbers: Sequence[str],
    whole: bool,
) -> Documents:
    streaming = settings.streaming
    split, part, _ = source.split.partition("[")
    if streaming and part:
        raise UserError(
            "a stream has no length to take a part of; give a whole split, or set "
            "data.streaming=false."
        )
    builder = _dataset_builder(source, split)
    given = builder.config.data_files or {}
    paths = map(str, given.get(split, chain(*given.values())))
    local = tuple(path for path in paths if Path(path).is_file())
    reads_lines = builder.repo_id is None and builder.name in ("json", "text")
    text_column = settings.text_column
    if reads_lines and builder.name == "text":
        text_column = None  # files of text have only one column

    def columns_of(found: list[str]) -> list[str]:
        return used_columns(found, text_column, chat, preference, numbers, whole)

    if reads_lines:
        builder = _line_reader(builder, split, columns_of, whole or chat is not None, numbers)
    dataset = _read_split(builder, source.split, streaming, local)
    sizes: list[int] = []
    if isinstance(builder, Generator):
        columns = list(builder.config.features)
        if streaming:
            files_read = builder.config.gen_kwargs["files"]
            sizes = [url_to_fs(path)[0].size(path) for path in files_read]
    else:
        columns = columns_of(dataset.column_names or list(next(iter(dataset), {})))
        dataset = dataset.select_columns(columns)
        if streaming:
            sizes = [1] * dataset.num_shards
    if columns[0] == "input_ids" and dataset.features:
        _require_whole_numbers(dataset.features["input_ids"])
    opened = Documents(name, dataset, columns[0], tuple(sizes), chat, local, asks=whole)
    if chat is None or preference is None:
        return opened
    return _of_answers(opened, chat, preference)


def _read_split(
    builder: DatasetBuilder, split: str, streaming: bool, local: Sequence[str]
) -> Dataset | IterableDataset:
    """A split of a dataset, as a stream or downloaded. Raises UserError when it holds nothing.

    `local` are those of its files that are on this machine.
    """
    if streaming:
        return builder.as_streaming_dataset(split)
    with differing_types_explained(local if builder.name == "parquet" else ()):
        builder.download_and_prepare()
    dataset = builder.as_dataset(split)
    if not len(dataset):
        raise UserError(
            "holds no documents; check data.dataset_split, data.data_dir and data.data_files."
        )
    return dataset


def _of_answers(opened: Documents, chat: ChatConfig, preference: PreferenceConfig) -> Documents:
    """A source of preferences that repeats every row, once for each document that it becomes."""
    from lacuna.data.judged import answers_per_row  # an extension, which few runs need

    dataset = opened.dataset
    count = answers_per_row(dataset, chat, preference.loss)
    if count > 1:
        dataset = dataset.select(np.repeat(np.arange(len(dataset)), count))
    return replace(opened, dataset=dataset, preference=preference, answers_per_row=count)


def _require_whole_numbers(feature: Any) -> None:
    """Raises UserError where tokens are something other than whole numbers."""
    kind = str(getattr(getattr(feature, "feature", None), "dtype", "no lists"))
    if not kind.startswith(("int", "uint")):
        raise UserError(f"input_ids must be lists of whole numbers, but has {kind}.")


def _dataset_builder(source: Source, split: str) -> DatasetBuilder:
    """What `datasets` makes of a source: its files by split, and the kind of their records."""
    if source.dataset == BUILT_IN:
        from lacuna.data.corpus import stdlib_files  # an extension

        return datasets.load_dataset_builder("text", data_files=stdlib_files())
    kind, options = infer_module_for_data_files_list([source.dataset])
    folder = None
    if Path(source.dataset).is_dir():
        folder = Path(source.dataset, source.dir or "")
    if kind is not None and folder is None:
        return datasets.load_dataset_builder(
            kind, data_files={split: [_exact_pattern(source.dataset)]}, **options
        )
    if source.dataset in READERS and not source.files:
        raise UserError("a reader of local files needs data.data_files.")
    if folder is not None and escape(str(folder.resolve())) != str(folder.resolve()):
        raise UserError(
            f"{folder} is a pattern to `datasets`; give it a name without brackets and the like."
        )
    chosen = list(source.files) or None
    if chosen and (folder is not None or source.dataset in READERS):
        chosen = [_exact_pattern(file, folder or Path(source.dir or "")) for file in chosen]
    builder = datasets.load_dataset_builder(
        source.dataset, source.name, data_dir=source.dir, data_files=chosen and {split: chosen}
    )
    if folder is not None and not (source.files or "data_files" in _read_card(source.dataset)):
        refuse_unread_files(folder)
    return builder


def _exact_pattern(file: str, folder: Path = Path()) -> str:
    """A pattern that fits this file alone, if it exists; otherwise `file` is itself a pattern."""
    path = folder / file
    return escape(str(path.absolute())) if path.is_file() else file


def _read_card(folder: str) -> str:
    card = Path(folder, REPOCARD_FILENAME)
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""


def _line_reader(
    builder: DatasetBuilder,
    split: str,
    columns_of: Callable[[list[str]], list[str]],
    is_record: bool,
    numbers: Sequence[str],
) -> Generator:
    """A reader of local JSON or text that goes on after a bad line; that of `datasets` does not.

    It gives the first of the columns, or, if a document `is_record`, the whole record.
    """
    found = builder.config.data_files
    if split not in found:
        raise UserError(f"no files of this split; there are {', '.join(map(str, found))}.")
    paths = found[split]
    columns = first_columns(paths, builder.name, columns_of)
    column = files.RECORD if is_record else columns[0]
    value = List(Value("int64")) if column == "input_ids" else Value("large_string")
    features = {column: value, files.BROKEN: Value("string")}
    for name in numbers:
        features[name] = Value("float64")
    arguments = {
        "files": paths,
        "kind": builder.name,
        "column": column,
        "numbers": tuple(numbers),
        "version": _READER_VERSION,
    }
    return Generator(
        features=Features(features),
        generator=files.read_records,
        gen_kwargs=arguments,
        split=NamedSplit(split),
    )
