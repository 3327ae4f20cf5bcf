"""Which files of a folder are data, whether all of them would be read, and whether they agree."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.exceptions import DatasetGenerationError
from datasets.load import infer_module_for_data_files_list
from pyarrow import ArrowInvalid, parquet

from lacuna.config import UserError
from lacuna.config.documents import READERS

# What `save_to_disk` and `push_to_hub` write beside data.
_NO_DATA = {"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}


def refuse_unread_files(folder: Path) -> None:
    """Raises UserError when `datasets` would leave out files of a folder in silence.

    It reads one kind of files; and where the names of some say a split, only those that do.
    """
    base = folder.resolve().as_posix()
    of_splits = _data_files(get_data_patterns(base), base)
    kinds: dict[str, str] = {}
    for file, kind in of_splits.items():
        kinds.setdefault(kind, file)
    if len(kinds) > 1:
        names = ", ".join(f"{kind} ({file})" for kind, file in kinds.items())
        raise UserError(
            f"holds files of several kinds, {names}; name those to read by data.data_files."
        )
    found = _data_files({"all": ["**"]}, base)
    unread = [file for file, kind in found.items() if kind in kinds and file not in of_splits]
    if unread:
        raise UserError(
            f"{', '.join(unread[:3])} would not be read, as only other names say a split, such as "
            f"{min(of_splits)}; name all files by data.data_files, or rename these."
        )


def _data_files(patterns: dict[str, list[str]], base: str) -> dict[str, str]:
    """The files of data in the folder `base` that fit patterns, with the kind of each."""
    files = chain(*DataFilesDict.from_patterns(patterns, base_path=base).values())
    kinds = {file: infer_module_for_data_files_list([file])[0] for file in files}
    return {
        Path(file).relative_to(base).as_posix(): kind
        for file, kind in kinds.items()
        if kind in READERS and Path(file).name not in _NO_DATA
    }


@contextmanager
def differing_types_explained(files: Iterable[str]) -> Iterator[None]:
    """A context in which Parquet files are read together.

    Raises `UserError` that names the column where they cannot be, as it differs between them.
    """
    try:
        yield
    except DatasetGenerationError:
        with suppress(OSError, ArrowInvalid):  # then they are damaged
            _refuse_differing_types(files)
        raise


def _refuse_differing_types(files: Iterable[str]) -> None:
    known: dict[str, tuple[str, str]] = {}
    for file in files:
        name = Path(file).name
        for column in parquet.read_schema(file):
            kind = str(column.type).removeprefix("large_")
            earlier, where = known.setdefault(column.name, (kind, name))
            if kind != earlier:
                raise UserError(
                    f"the column {column.name} is {earlier} in {where} and {kind} in {name}; write "
                    "it alike, or name files that agree by data.data_files"
                )
