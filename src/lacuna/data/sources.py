"""A source of the configuration to an opened dataset with one column of documents, patiently where networks fail."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from itertools import chain, islice
from pathlib import Path
from traceback import walk_tb
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, DatasetBuilder, Features, IterableDataset, List, NamedSplit, Value
from datasets.config import REPOCARD_FILENAME
from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.exceptions import DatasetGenerationError
from datasets.load import infer_module_for_data_files_list
from datasets.packaged_modules.generator.generator import Generator
from fsspec.core import url_to_fs
from pyarrow import ArrowInvalid
from yaml import YAMLError

from lacuna.config import Config, UserError, logger, refuse
from lacuna.config.documents import READERS, ChatConfig, Source
from lacuna.config.objectives import PreferenceConfig
from lacuna.data import corpus, files
from lacuna.data.messages import conversation_columns

_READER_VERSION = 2
_COLUMNS = ("text", "content", "input_ids")
_LONGEST_PAUSE = 60.0
_HTTP_LIBRARIES = {
    "http",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "urllib3",
    "aiohttp",
    "huggingface_hub",
}
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
# What `save_to_disk` writes beside its data.
_NO_DATA = {"state.json"}
# How `datasets` and the Hub's client begin when they are offline, or have tried again themselves.
_GAVE_UP = ("Couldn't reach", "Cannot reach", "Offline mode")
_PASSING_STATUS = {408, 425, 429}
_DAMAGED, _AGAIN = "is damaged, or not in UTF-8", "write or download it again"
# Records among which one must have the columns.
_FIRST = 1000


@dataclass(frozen=True)
class Documents:
    """An opened source: `column` of `dataset` holds a text per record, or, called input_ids, its tokens.

    With `chat` settings a record is a conversation, as JSON where the column is `files.RECORD`;
    with those of `preference` besides, it is two answers of which one is better, or one that is
    good or not. Each record is there as many times as there are `answers_per_row` that are
    documents of their own. A streaming source also has `shard_sizes`: how big each of the dataset's shards is, in a unit of
    their own. `files` are the local ones that it is made of.
    """

    name: str
    dataset: Dataset | IterableDataset
    column: str
    shard_sizes: tuple[int, ...] = ()
    chat: ChatConfig | None = None
    files: tuple[str, ...] = ()
    preference: PreferenceConfig | None = None
    answers_per_row: int = 1


def open_source(source: Source, config: Config, numbers: Sequence[str] = ()) -> Documents:
    """Open a source of documents, or of conversations, as the task wants them; with its columns of `numbers`.

    Raises UserError when there is no such dataset, file, split or column, or nothing in it.
    """
    parts = [source.name, source.dir, ",".join(source.files), f"split {source.split}"]
    name = f"{source.dataset} ({', '.join(part for part in parts if part)})"
    try:
        return next(
            with_retries(lambda: [_open(name, source, config, numbers)], config.data.retries, name)
        )
    except (
        UserError,
        DatasetGenerationError,
        OSError,
        ValueError,
        RuntimeError,
        YAMLError,
    ) as error:
        cause = isinstance(error, DatasetGenerationError) and error.__cause__ or error
        reason = " ".join(str(cause).split())
        if is_damage(cause):
            reason = f"{_DAMAGED}: {reason}; {_AGAIN}"
        elif not isinstance(cause, UserError):
            mend = "check data.dataset or validation.dataset, name, split, folder, files, and if the Hub can be reached"
            reason = f"cannot be opened: {reason}; {mend}"
        raise UserError(f"{name}: {reason}") from error


def _open(name: str, source: Source, config: Config, numbers: Sequence[str]) -> Documents:
    streaming, chat = config.data.streaming, config.conversations
    split, part, _ = source.split.partition("[")
    whole = (
        "a stream has no length to take a part of; give a whole split, or set data.streaming=false"
    )
    refuse({whole: streaming and part != ""})
    builder = _builder(source, split)
    given = builder.config.data_files or {}
    local = tuple(
        path for path in map(str, given.get(split, chain(*given.values()))) if Path(path).is_file()
    )
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
        columns = _used_columns(found, config.data.text_column, config, numbers)
        dataset, sizes = (
            dataset.select_columns(columns),
            [1] * dataset.num_shards if streaming else [],
        )
    if columns[0] == "input_ids" and dataset.features:
        of = str(
            getattr(getattr(dataset.features["input_ids"], "feature", None), "dtype", "no lists")
        )
        refuse(
            {
                f"input_ids must be lists of whole numbers, but has {of}": not of.startswith(
                    ("int", "uint")
                )
            }
        )
    if config.trains_on != "preferences":
        return Documents(name, dataset, columns[0], tuple(sizes), chat, local)
    from lacuna.data.preferences import answers_per_row  # an extension, as few need it

    preference = config.preference
    answers = answers_per_row(dataset, chat, preference.loss)
    if answers > 1:
        dataset = dataset.select(np.repeat(np.arange(len(dataset)), answers))
    return Documents(name, dataset, columns[0], tuple(sizes), chat, local, preference, answers)


def _builder(source: Source, split: str) -> DatasetBuilder:
    """What `datasets` makes of a source: its files by split, and the kind of their records."""
    if source.dataset == corpus.NAME:
        return datasets.load_dataset_builder("text", data_files=corpus.stdlib_files())
    kind, options = infer_module_for_data_files_list([source.dataset])
    folder = Path(source.dataset, source.dir or "") if Path(source.dataset).is_dir() else None
    if kind is not None and folder is None:
        return datasets.load_dataset_builder(
            kind, data_files={split: [_exactly(source.dataset)]}, **options
        )
    refuse(
        {
            "a reader of local files needs data.data_files": source.dataset in READERS
            and not source.files
        }
    )
    pattern = f"{folder} is a pattern to `datasets`; give it a name without brackets and the like"
    refuse({pattern: folder is not None and escape(str(folder.resolve())) != str(folder.resolve())})
    chosen = list(source.files) or None
    if chosen and (folder is not None or source.dataset in READERS):
        chosen = [_exactly(file, folder or Path(source.dir or "")) for file in chosen]
    builder = datasets.load_dataset_builder(
        source.dataset, source.name, data_dir=source.dir, data_files=chosen and {split: chosen}
    )
    if folder is not None and not (source.files or "data_files" in _card(source.dataset)):
        _refuse_kinds(folder)
    return builder


def _exactly(file: str, folder: Path = Path()) -> str:
    """A pattern for a file that exists and nothing else; what names none is a pattern as it is."""
    path = folder / file
    return escape(str(path.absolute())) if path.is_file() else file


def _card(folder: str) -> str:
    card = Path(folder, REPOCARD_FILENAME)
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""


def _refuse_kinds(folder: Path) -> None:
    """Raises UserError when a folder holds files of several kinds, of which `datasets` would read one."""
    kinds: dict[str, str] = {}
    base = folder.resolve().as_posix()
    for file in chain(
        *DataFilesDict.from_patterns(get_data_patterns(base), base_path=base).values()
    ):
        kind = infer_module_for_data_files_list([file])[0]
        if kind in READERS and Path(file).name not in _NO_DATA:
            kinds.setdefault(kind, Path(file).relative_to(base).as_posix())
    names = ", ".join(f"{kind} ({file})" for kind, file in kinds.items())
    refuse(
        {
            f"holds files of several kinds, {names}; name those to read by data.data_files": len(
                kinds
            )
            > 1
        }
    )


def _line_reader(
    builder: DatasetBuilder, split: str, config: Config, numbers: Sequence[str]
) -> Generator:
    """In place of the reader of local JSON or text that `datasets` has, one that goes on after a bad line."""
    found, kind = builder.config.data_files, builder.name
    refuse({f"no files of this split; there are {', '.join(map(str, found))}": split not in found})
    paths, wanted = found[split], config.data.text_column if kind == "json" else None
    columns = _first_columns(
        paths, kind, lambda columns: _used_columns(columns, wanted, config, numbers)
    )
    column = columns[0] if config.conversations is None else files.RECORD
    value = List(Value("int64")) if column == "input_ids" else Value("large_string")
    features = Features(
        {column: value, files.BROKEN: Value("string")} | dict.fromkeys(numbers, Value("float64"))
    )
    arguments = {
        "files": paths,
        "kind": kind,
        "column": column,
        "numbers": tuple(numbers),
        "version": _READER_VERSION,
    }
    return Generator(
        features=features,
        generator=files.read_records,
        gen_kwargs=arguments,
        split=NamedSplit(split),
    )


def _first_columns(
    paths: list[str], kind: str, choose: Callable[[list[str]], list[str]]
) -> list[str]:
    """The columns that are chosen from those of the first record that has them, as a broken one may come before it."""
    known: dict[str, None] = {}
    for record, _ in islice(files.records_of(paths, kind), _FIRST):
        if isinstance(record, dict):
            known |= dict.fromkeys(record)
            with suppress(UserError):
                return choose(list(record))
    refuse({f"{paths[0]}: holds no JSON objects; give one object with a text per line": not known})
    return choose(list(known))


def _used_columns(
    columns: list[str], wanted: str | None, config: Config, numbers: Sequence[str]
) -> list[str]:
    known = ", ".join(columns)
    refuse(
        {
            f"curriculum.difficulty_column: no column {name}; it has {known}": name not in columns
            for name in numbers
        }
    )
    if config.trains_on == "preferences":
        from lacuna.data.preferences import judged_columns  # an extension, as few need it

        _, used = judged_columns(columns, config.chat, config.preference.loss)
        return [*used.values(), *numbers]
    if config.conversations is not None:
        return [*conversation_columns(columns, config.chat)[1].values(), *numbers]
    candidates = (wanted,) if wanted else _COLUMNS
    found = [name for name in candidates if name in columns]
    refuse(
        {
            f"no column {' or '.join(candidates)}; it has {known}; name one by data.text_column": not found
        }
    )
    return [found[0], *numbers]


def is_damage(error: BaseException) -> bool:
    """Whether an error tells of bytes that came wrong, not of such as did not come."""
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    arrow = type(error) is OSError and error.errno is None and "pyarrow" in "".join(frames[-1:])
    return arrow or isinstance(error, (ArrowInvalid, UnicodeDecodeError))


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Within it, damage of a source becomes a `UserError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        if not is_damage(error):
            raise
        raise UserError(f"{name}: {_DAMAGED}: {error}; {_AGAIN}") from error


def may_pass(error: BaseException) -> bool:
    """Whether an error is a fault of the network or of storage that another attempt may not meet."""
    if isinstance(error, _LASTING) or is_damage(error) or str(error).startswith(_GAVE_UP):
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
            logger.warning(
                "%s: %s; trying again in %.1f s (%d of %d)", what, error, pause, failures, retries
            )
            time.sleep(pause)
