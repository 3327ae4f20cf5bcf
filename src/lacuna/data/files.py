"""Lines and whole texts out of local or remote files, compressed or not; a bad line never ends a run."""

import glob
import io
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

import fsspec
import pyarrow as pa
from fsspec.core import url_to_fs

from lacuna.config import UserError

BROKEN = "broken"
"""Column in which the readers say why and where a record is unreadable; null where it is not."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bz2"}
KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".txt": "text",
         ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv"}  # fmt: skip
LINE_KINDS = {"json", "text"}
_LINES_LOOKED_AT = 1000


class File(NamedTuple):
    """A file and what tells whether it changed: its size in bytes and its time of modification."""

    path: str
    size: int
    modified: str


def kind_of(path: str) -> str | None:
    """The kind of records in a file by its name (json, text, parquet, arrow, csv), None when unknown."""
    suffixes = PurePosixPath(path.lower()).suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


def find_files(pattern: str) -> list[File]:
    """The files that a path, a pattern with wildcards or a remote address names, in sorted order.

    Raises UserError when there are none.
    """
    filesystem, path = url_to_fs(pattern)
    names = sorted(filesystem.glob(path)) if glob.has_magic(path) else [path]
    found = [filesystem.info(name) for name in names if filesystem.isfile(name)]
    if not found:
        raise UserError(f"{pattern}: no such file; check the path (data.dataset, data.data_files)")
    return [
        File(filesystem.unstrip_protocol(i["name"]) if "://" in pattern else i["name"], int(i["size"] or 0),
             str(i.get("mtime") or i.get("etag") or i.get("LastModified") or ""))
        for i in found
    ]  # fmt: skip


def columns_of(files: list[File], kind: str) -> list[str]:
    """The columns of JSON records, as the first readable one has them; `text` for whole texts."""
    if kind == "text":
        return ["text"]
    for file in files:
        for number, (record, _) in enumerate(_json_records(file.path)):
            if isinstance(record, dict):
                return list(record)
            if number == _LINES_LOOKED_AT:
                break
    raise UserError(f"{files[0].path}: holds no JSON objects; give one object with a text per line")


def read_records(files: list[File], kind: str, column: str, version: int) -> Iterator[dict[str, Any]]:
    """Yield `column` (None where unreadable) and BROKEN (None where readable) of every record.

    `version` is that of this reader: a part of what caches are keyed by.
    """
    for file in files:
        if kind == "text":
            yield _read_text(file.path, column)
            continue
        for record, place in _json_records(file.path):
            value = record.get(column) if isinstance(record, dict) else None
            if isinstance(value, list if column == "input_ids" else str):
                yield {column: value, BROKEN: None}
            else:
                problem = f"no {column}" if isinstance(record, dict) else "not a JSON object"
                yield {column: None, BROKEN: f"{place}: {problem}"}


def _read_text(path: str, column: str) -> dict[str, Any]:
    with _opened(path) as stream:
        try:
            return {column: stream.read().decode(), BROKEN: None}
        except UnicodeDecodeError as error:
            return {column: None, BROKEN: f"{path}: not UTF-8 ({error.reason} at byte {error.start})"}


def _json_records(path: str) -> Iterator[tuple[Any, str]]:
    """Each record with its place; a line that is no JSON as None; a file that is one JSON list as its elements."""
    with _opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1 and line.lstrip().startswith(b"[") and ".jsonl" not in path:
                yield from _json_list(line + stream.read(), path)
                return
            if line.strip():
                yield _parse(line), f"{path}:{number}"


def _json_list(content: bytes, path: str) -> Iterator[tuple[Any, str]]:
    records = _parse(content)
    if not isinstance(records, list):
        raise UserError(f"{path}: begins like a JSON list but is none; give one JSON object per line")
    for number, record in enumerate(records, start=1):
        yield record, f"{path}, element {number}"


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed. Raises UserError when they are damaged."""
    with fsspec.open(path, "rb") as stream:
        try:
            yield _decompressed(stream, COMPRESSIONS.get(PurePosixPath(path.lower()).suffix))
        except (EOFError, OSError, lzma.LZMAError) as error:
            if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
                raise  # bytes that did not come, not bytes that came wrong
            raise UserError(f"{path}: is damaged ({error}); write or download it again") from error


def _decompressed(stream: IO[bytes], codec: str | None) -> IO[bytes]:
    if codec == "xz":
        return lzma.open(stream)
    if codec is not None:  # Arrow's readers go on over several frames and notice a missing end
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), codec))
    return stream
