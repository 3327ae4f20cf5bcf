"""What a user is told: the error that every mistake raises, hints at what was meant, and the log of a run."""

import difflib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

logger = logging.getLogger("lacuna")

LAUNCHED = (
    "LACUNA_LAUNCHED"  # in the environment of processes that lacuna itself started: which one did
)
STORE = "LACUNA_STORE"  # there as well: the open socket at which they find each other


class UserError(Exception):
    """A mistake in the configuration or the input: what is wrong, where, and how to mend it.

    The command line prints the message without a traceback and exits with status 2.
    """


def refuse(reasons: dict[str, bool]) -> None:
    """Raises `UserError` with the first of the `reasons` that applies."""
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"{reason}.")


@contextmanager
def explained(what: str, *kinds: type[Exception], mend: str) -> Iterator[None]:
    """Within it, errors of these kinds become a `UserError`: what is wrong, the first line they say, how to mend it."""
    try:
        yield
    except kinds as error:
        first, _, more = str(error).strip().partition("\n")
        reason = first + more.partition("\n")[0] if first.endswith(":") else first
        reason = getattr(error, "strerror", None) or reason.rstrip(".")
        raise UserError(f"{what}: {' '.join(reason.split())}; {mend}") from error


def require_writable(folder: str) -> None:
    """Raises `UserError` where an output folder cannot be made or written to; makes nothing."""
    wrong = f"job.dump_folder: cannot write to {folder!r}"
    with explained(wrong, OSError, mend="choose another folder"):
        path = Path(folder).absolute()
        there = next(one for one in (path, *path.parents) if one.exists())
        is_folder, is_open = there.is_dir(), os.access(there, os.W_OK | os.X_OK)
    refuse(
        {
            f"{wrong}: {there} is a file; choose another folder": not is_folder,
            f"{wrong}: {there} may not be written to; choose another folder": not is_open,
        }
    )


def make_folder(folder: str) -> None:
    """Makes an output folder, unless it is there. Raises `UserError` as `require_writable` does."""
    require_writable(folder)
    with explained(
        f"job.dump_folder: cannot write to {folder!r}", OSError, mend="choose another folder"
    ):
        os.makedirs(folder, exist_ok=True)


def of_stage(number: int) -> AbstractContextManager[None]:
    """Within it, a `UserError` also tells the table of the curriculum; 0 is what was there before the first."""
    where = f"curriculum.stages, table {number}"
    return explained(where, UserError, mend="change it in that table") if number else nullcontext()


class RunError(Exception):
    """Something outside the configuration stopped a run (a full disk, a loss that is not finite).

    The command line prints the message without a traceback and exits with status 1.
    """


class UnansweredError(RunError):
    """A wait for other ranks came to nothing: who says so is not who is to blame."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that proposes the known word most like `word`, empty when none is alike."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def nearby(path: Path) -> str:
    """What helps to mend a missing file: what there is in its folder that resembles it."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    hint = did_you_mean(path.name, (neighbour.name for neighbour in path.parent.iterdir()))
    return hint.removeprefix("; ") or f"nothing in {path.parent.resolve()} resembles it"
