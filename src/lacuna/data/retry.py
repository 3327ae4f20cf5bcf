"""Patience with networks: which faults pass by themselves, and trying again after growing pauses."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE = 60.0
_HTTP_LIBRARIES = {"http", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "aiohttp", "huggingface_hub"}
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
# How `datasets` and the Hub's client begin when they are offline, or have tried again themselves.
_GAVE_UP = ("Couldn't reach", "Cannot reach", "Offline mode")
_PASSING_STATUS = {408, 425, 429}


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
            _LOG.warning("%s: %s; trying again in %.1f s (%d of %d)", what, error, pause, failures, retries)
            time.sleep(pause)
