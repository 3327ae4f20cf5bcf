"""Faults of networks, storage and files: which may pass by themselves, and which are damage."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TypeVar

from pyarrow import ArrowInvalid

from lacuna.config import UserError, logger

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
# Beginnings of messages of `datasets` and the Hub's client: they are offline, or have tried again
# themselves.
_GAVE_UP = ("Couldn't reach", "Cannot reach", "Offline mode")
_PASSING_STATUS = {408, 425, 429}

Element = TypeVar("Element")


def is_damage(error: BaseException) -> bool:
    """Whether an error tells that bytes arrived but are wrong, and not that none arrived."""
    if isinstance(error, (ArrowInvalid, UnicodeDecodeError)):
        return True
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return type(error) is OSError and error.errno is None and "pyarrow" in "".join(files[-1:])


def damage_message(error: BaseException) -> str:
    """The end of a message about a source that is damaged."""
    said = " ".join(str(error).split())
    return f"is damaged, or not in UTF-8: {said}; write or download it again"


@contextmanager
def readable(name: str) -> Iterator[None]:
    """A context in which damage to the source of this name becomes a `UserError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        if not is_damage(error):
            raise
        raise UserError(f"{name}: {damage_message(error)}") from error


def may_pass(error: BaseException) -> bool:
    """Whether an error is a fault of the network or storage that another attempt may not meet."""
    if isinstance(error, _LASTING) or is_damage(error) or str(error).startswith(_GAVE_UP):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return bool(status >= 500 or status in _PASSING_STATUS)
    libraries = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(libraries & _HTTP_LIBRARIES)


def with_retries(
    start: Callable[[], Iterable[Element]], retries: int, what: str
) -> Iterator[Element]:
    """Yields what `start` gives; after a passing fault calls it again, to go on after the last.

    Raises the last fault after `retries` in a row, and any other error at once.
    """
    failures = 0
    while True:
        try:
            for element in start():
                yield element
                failures = 0
            return
        except Exception as error:  # libraries have many kinds: `may_pass` tells which to catch
            if failures == retries or not may_pass(error):
                raise
            pause = min(_LONGEST_PAUSE, 0.5 * 2**failures)
            failures += 1
            logger.warning(
                "%s: %s; trying again in %.1f s (%d of %d)", what, error, pause, failures, retries
            )
            time.sleep(pause)
