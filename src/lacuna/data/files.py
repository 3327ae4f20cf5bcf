"""Records out of local or remote files of JSON or whole texts, compressed or not; a bad line never ends a run."""

import io
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import fsspec
import pyarrow as pa
from fsspec.utils import infer_compression

from lacuna.config import UserError

# Column in which the reader gives whole records, as JSON.
RECORD = "record"
# Column in which the reader says why and where a record is unreadable; null where it is not.
BROKEN = "broken"


def read_records(files: list[str], kind: str, column: str, numbers: tuple[str, ...], version: int) -> Iterator[dict]:
    """Yield `column` (None where unreadable), BROKEN (None where readable) and the `numbers` of every record.

    RECORD is the column of everything. `kind` is json (an object per line, or one list of them) or text (each file is
    a record); `version` that of this reader: a part of what caches are keyed by.
    """
    for record, place in records_of(files, kind):
        values = record if isinstance(record, dict) else {}
        value = json.dumps(record) if values and column == RECORD else values.get(column)
        readable = isinstance(value, list if column == "input_ids" else str)
        found = {column: value, BROKEN: None} if readable else {column: None, BROKEN: f"{place}: no {column}"}
        yield found | {name: values.get(name) for name in numbers}


def records_of(files: list[str], kind: str) -> Iterator[tuple[Any, str]]:
    """Each record, None where it cannot be parsed, with its place. Raises UserError when a file is damaged."""
    for path in files:
        with _opened(path) as stream:
            if kind == "text":
                yield _parsed(stream.read(), lambda content: {"text": content.decode()}), path
                continue
            for number, line in enumerate(stream, start=1):
                if number == 1 and line.lstrip().startswith(b"[") and ".jsonl" not in path:
                    records = _parsed(line + stream.read(), json.loads)
                    for element, record in enumerate(records if isinstance(records, list) else [None], start=1):
                        yield record, f"{path}, element {element}"
                elif line.strip():
                    yield _parsed(line, json.loads), f"{path}:{number}"


def _parsed(content: bytes, parse: Any) -> Any:
    with suppress(ValueError):
        return parse(content)


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed. Raises UserError when they are damaged."""
    codec = infer_compression(path)
    with fsspec.open(path, "rb", compression=codec if codec == "xz" else None) as stream:
        try:
            if codec and codec != "xz":  # Arrow's readers go on over several frames and notice a missing end
                stream = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), codec))
            yield stream
        except (EOFError, OSError, lzma.LZMAError) as error:
            if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
                raise  # bytes that did not come, not bytes that came wrong
            raise UserError(f"{path}: is damaged ({error}); write or download it again") from error
