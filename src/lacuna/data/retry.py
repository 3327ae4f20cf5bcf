"""Patience with networks: which faults pass by themselves, and trying again after growing pauses."""

import http.client
import logging
import time
from collections.abc import Callable
from typing import Any

_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE = 60.0
_HTTP_LIBRARIES = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp", "huggingface_hub"}
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_GAVE_UP = ("Couldn't reach", "Cannot reach", "Offline mode")
"""How `datasets` and the Hub's client begin when they are offline, or have tried again themselves."""
_PASSING_STATUS = {408, 425, 429}


def may_pass(error: BaseException) -> bool:
    """Whether an error is a fault of the network or of storage that another attempt may not meet."""
    if isinstance(error, _LASTING) or str(error).startswith(_GAVE_UP):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status >= 500 or status in _PASSING_STATUS
    libraries = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError | http.client.HTTPException) or bool(libraries & _HTTP_LIBRARIES)


def with_retries(action: Callable[[], Any], retries: int, what: str) -> Any:
    """Return what `action` returns, calling it up to `retries` times more when a passing fault stops it.

    Raises the last fault when there is no attempt left, and any other error at once.
    """
    for attempt in range(retries + 1):
        try:
            return action()
        except Exception as error:
            if attempt == retries or not may_pass(error):
                raise
            pause = min(_LONGEST_PAUSE, 0.5 * 2**attempt)
            _LOG.warning("%s: %s; trying again in %.1f s (%d of %d)", what, error, pause, attempt + 1, retries)
            time.sleep(pause)
    raise AssertionError("unreachable: the last attempt returns or raises")
