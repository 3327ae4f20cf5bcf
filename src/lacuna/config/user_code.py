"""Imports the user's own Python code, which the configuration names as `module:attribute`."""

import importlib
import os
import sys
from typing import Any

from lacuna.config.errors import did_you_mean


def import_attribute(name: str) -> Any:
    """The attribute of a module; the module may be in the present folder too.

    Raises `ValueError` where there is none, or the module does not import.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's own lines raise
        mend = "mend it there"
        if isinstance(error, ModuleNotFoundError):
            mend = f"install {error.name}, or start the run in the folder where it lies"
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{module} does not import ({reason}); {mend}") from error
    if not hasattr(found, attribute):
        hint = did_you_mean(attribute, vars(found)) or "; name one that it has"
        raise ValueError(f"{module} has no {attribute}{hint}")
    return getattr(found, attribute)
