"""Records of files of JSON or texts, compressed or not; a bad line never ends a run."""

import codecs
import io
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import fsspec
import pyarrow as pa
from fsspec.utils import infer_compression

from lacuna.config import UserError

# Column in which the reader gives whole records, as JSON.
RECORD = "record"
# Column in which the reader says why and where a record is unreadable; null where it is not.
BROKEN = "broken"


def read_records(
    files: list[str], kind: str, column: str, numbers: tuple[str, ...], version: int
) -> Iterator[dict[str, Any]]:
    """Yields what is used of every record: `column`, the columns of `numbers`, and BROKEN.

    Where a record is unreadable, `column` is None; everywhere else BROKEN is. If `column` is
    RECORD, it holds the whole record. `kind` is json (an object per line, or one list of them) or
    text (each file is a record). `version` is that of this reader: caches are keyed by it, too.
    """
    for record, place in records_of(files, kind):
        values = record if isinstance(record, dict) else {}
        value = values.get(column)
        if values and column == RECORD:
            value, place = _parse_or_explain(values, place, json.dumps)
        readable = is_tokens(value) if column == "input_ids" else isinstance(value, str)
        wrong = f"{place}: {'no ' if value is None else 'unfit '}{column}"
        found = {column: value, BROKEN: None} if readable else {column: None, BROKEN: wrong}
        yield found | {name: values.get(name) for name in numbers}


def is_tokens(value: Any) -> bool:
    """Whether a value is a list of whole numbers, each of which an int64 holds."""
    return (
        isinstance(value, list)
        and {*map(type, value)} <= {int}
        and max(map(abs, value), default=0) < 2**63
    )


def records_of(files: list[str], kind: str) -> Iterator[tuple[Any, str]]:
    """Each record and its place, or None and its place with what is wrong there.

    Raises UserError when a file is damaged, or in another encoding than UTF-8.
    """
    for path in files:
        with _open_decompressed(path) as stream:
            if kind == "text":
                content = stream.read()
                _refuse_encoding(path, content)
                yield _parse_or_explain(
                    content, path, lambda content: {"text": content.decode("utf-8-sig")}
                )
                continue
            begun = False
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    _refuse_encoding(path, line)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not begun and line.lstrip().startswith(b"[") and ".jsonl" not in path:
                    yield from _elements_of_list(line + stream.read(), path)
                elif line.strip():
                    yield _parse_or_explain(line, f"{path}:{number}", of_json)
                begun = begun or line.strip() != b""


def _refuse_encoding(path: str, beginning: bytes) -> None:
    encoding = json.detect_encoding(beginning[:4])
    if not encoding.startswith("utf-8"):
        raise UserError(f"{path}: is in {encoding.upper()}; write it in UTF-8.")


def _elements_of_list(content: bytes, path: str) -> Iterator[tuple[Any, str]]:
    records, place = _parse_or_explain(content, path, of_json)
    if not isinstance(records, list):
        yield None, place
    for number, record in enumerate(records or (), start=1):
        yield record, f"{path}, element {number}"


def of_json(content: bytes) -> Any:
    """The value of JSON. Raises ValueError also for text that is half of a surrogate pair."""
    value = json.loads(content)
    if b"\\u" in content:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _parse_or_explain(content: Any, place: str, parse: Callable[[Any], Any]) -> tuple[Any, str]:
    """What `parse` makes of a content, and its place; or None, and its place with what is wrong."""
    try:
        return parse(content), place
    except (ValueError, RecursionError) as error:
        return None, f"{place}: {error}"


@contextmanager
def _open_decompressed(path: str) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed. Raises UserError when they are damaged."""
    codec = infer_compression(path)
    with fsspec.open(path, "rb", compression=codec if codec == "xz" else None) as stream:
        try:
            if codec and codec != "xz":
                # Arrow's readers go on over several frames and notice a missing end.
                packed = pa.PythonFile(stream, mode="r")
                stream = io.BufferedReader(pa.CompressedInputStream(packed, codec))
            yield stream
        except (EOFError, OSError, lzma.LZMAError) as error:
            is_plain = type(error) is OSError and error.errno is None
            if isinstance(error, OSError) and not is_plain:
                raise  # bytes did not arrive; they are not damaged
            raise UserError(f"{path}: is damaged ({error}); write or download it again") from error
