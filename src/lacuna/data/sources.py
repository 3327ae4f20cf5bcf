"""A source of the configuration to an opened dataset with one column of documents, patiently where networks fail."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetBuilder, Features, IterableDataset, List, NamedSplit, Value
from datasets.exceptions import DatasetGenerationError
from datasets.load import infer_module_for_data_files_list
from datasets.packaged_modules.generator.generator import Generator
from fsspec.core import url_to_fs

from lacuna.config import Config, UserError, logger, refuse
from lacuna.config.checks import READERS
from lacuna.config.documents import ChatConfig, Source
from lacuna.data import corpus, files
from lacuna.data.chat import conversation_columns

_READER_VERSION = 2
_COLUMNS = ("text", "content", "input_ids")
_LONGEST_PAUSE = 60.0
_HTTP_LIBRARIES = {"http", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "aiohttp", "huggingface_hub"}
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
# How `datasets` and the Hub's client begin when they are offline, or have tried again themselves.
_GAVE_UP = ("Couldn't reach", "Cannot reach", "Offline mode")
_PASSING_STATUS = {408, 425, 429}


@dataclass(frozen=True)
class Documents:
    """An opened source: `column` of `dataset` holds a text per record, or, called input_ids, its tokens.

    With `chat` settings a record is a conversation, as JSON where the column is `files.RECORD`. A streaming source also
    has `shard_sizes`: how big each of the dataset's shards is, in a unit of their own.
    """

    name: str
    dataset: Dataset | IterableDataset
    column: str
    shard_sizes: tuple[int, ...] = ()
    chat: ChatConfig | None = None


def open_source(source: Source, config: Config, numbers: Sequence[str] = ()) -> Documents:
    """Open a source of documents, or of conversations, as the task wants them; with its columns of `numbers`.

    Raises UserError when there is no such dataset, file, split or column, or nothing in it.
    """
    parts = [source.name, source.dir, ",".join(source.files), f"split {source.split}"]
    name = f"{source.dataset} ({', '.join(part for part in parts if part)})"
    try:
        return next(with_retries(lambda: [_open(name, source, config, numbers)], config.data.retries, name))
    except (UserError, DatasetGenerationError, FileNotFoundError, ValueError, ConnectionError) as error:
        cause = isinstance(error, DatasetGenerationError) and error.__cause__ or error
        reason = str(cause).strip().partition("\n")[0]
        if not isinstance(cause, UserError):
            mend = "check data.dataset or validation.dataset, name, split, folder, files, and if the Hub can be reached"
            reason = f"cannot be opened: {reason}; {mend}"
        raise UserError(f"{name}: {reason}") from error


def _open(name: str, source: Source, config: Config, numbers: Sequence[str]) -> Documents:
    streaming, chat = config.data.streaming, config.conversations
    split, part, _ = source.split.partition("[")
    whole = "a stream has no length to take a part of; give a whole split, or set data.streaming=false"
    refuse({whole: streaming and part != ""})
    builder = _builder(source, split)
    if builder.repo_id is None and builder.name in ("json", "text"):
        builder = _line_reader(builder, split, config, numbers)
    if not streaming:
        builder.download_and_prepare()
    dataset = (builder.as_streaming_dataset if streaming else builder.as_dataset)(source.split)
    empty = "holds no documents; check data.dataset_split, data.data_dir and data.data_files"
    refuse({empty: not streaming and not len(dataset)})
    if isinstance(builder, Generator):
        columns, paths = list(builder.config.features), builder.config.gen_kwargs["files"]
        sizes = [url_to_fs(path)[0].size(path) for path in paths] if streaming else []
    else:
        found = dataset.column_names or list(next(iter(dataset), {}))
        columns = _used_columns(found, config.data.text_column, chat, numbers)
        dataset, sizes = dataset.select_columns(columns), [1] * dataset.num_shards if streaming else []
    return Documents(name, dataset, columns[0], tuple(sizes), chat)


def _builder(source: Source, split: str) -> DatasetBuilder:
    """What `datasets` makes of a source: its files by split, and the kind of their records."""
    if source.dataset == corpus.NAME:
        return datasets.load_dataset_builder("text", data_files=corpus.stdlib_files())
    kind, options = infer_module_for_data_files_list([source.dataset])
    if kind is not None and not Path(source.dataset).is_dir():
        return datasets.load_dataset_builder(kind, data_files={split: [source.dataset]}, **options)
    refuse({"a reader of local files needs data.data_files": source.dataset in READERS and not source.files})
    chosen = {split: list(source.files)} if source.files else None
    return datasets.load_dataset_builder(source.dataset, source.name, data_dir=source.dir, data_files=chosen)


def _line_reader(builder: DatasetBuilder, split: str, config: Config, numbers: Sequence[str]) -> Generator:
    """In place of the reader of local JSON or text that `datasets` has, one that goes on after a bad line."""
    found, kind, chat = builder.config.data_files, builder.name, config.conversations
    refuse({f"no files of this split; there are {', '.join(map(str, found))}": split not in found})
    paths, wanted = found[split], config.data.text_column if kind == "json" else None
    first = next((record for record, _ in files.records_of(paths, kind) if isinstance(record, dict)), None)
    refuse({f"{paths[0]}: holds no JSON objects; give one object with a text per line": first is None})
    columns = _used_columns(list(first), wanted, chat, numbers)
    column = columns[0] if chat is None else files.RECORD
    value = List(Value("int64")) if column == "input_ids" else Value("large_string")
    features = Features({column: value, files.BROKEN: Value("string")} | dict.fromkeys(numbers, Value("float64")))
    arguments = {"files": paths, "kind": kind, "column": column, "numbers": tuple(numbers), "version": _READER_VERSION}
    return Generator(features=features, generator=files.read_records, gen_kwargs=arguments, split=NamedSplit(split))


def _used_columns(columns: list[str], wanted: str | None, chat: ChatConfig | None, numbers: Sequence[str]) -> list[str]:
    known = ", ".join(columns)
    refuse({f"curriculum.difficulty_column: no column {name}; it has {known}": name not in columns for name in numbers})
    if chat is not None:
        return [*conversation_columns(columns, chat)[1].values(), *numbers]
    candidates = (wanted,) if wanted else _COLUMNS
    found = [name for name in candidates if name in columns]
    refuse({f"no column {' or '.join(candidates)}; it has {known}; name one by data.text_column": not found})
    return [found[0], *numbers]


def may_pass(error: BaseException) -> bool:
    """Whether an error is a fault of the network or of storage that another attempt may not meet."""
    if isinstance(error, _LASTING) or str(error).startswith(_GAVE_UP):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status >= 500 or status in _PASSING_STATUS
    libraries = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(libraries & _HTTP_LIBRARIES)


def with_retries(start: Callable[[], Iterable[Any]], retries: int, what: str) -> Iterator[Any]:
    """Yield what `start` gives; after a passing fault call it again, to go on behind what was yielded last.

    Raises the last fault after `retries` in a row, and any other error at once.
    """
    failures = 0
    while True:
        try:
            for element in start():
                yield element
                failures = 0
            return
        except Exception as error:
            if failures == retries or not may_pass(error):
                raise
            pause = min(_LONGEST_PAUSE, 0.5 * 2**failures)
            failures += 1
            logger.warning("%s: %s; trying again in %.1f s (%d of %d)", what, error, pause, failures, retries)
            time.sleep(pause)
