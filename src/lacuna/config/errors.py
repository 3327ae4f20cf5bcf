"""What a user is told: the error that every mistake raises, hints at what was meant, and the log of a run."""

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

logger = logging.getLogger("lacuna")


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
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(f"{what}: {' '.join(reason.split())}; {mend}") from error


def of_stage(number: int) -> AbstractContextManager[None]:
    """Within it, a `UserError` also tells the table of the curriculum; 0 is what was there before the first."""
    where = f"curriculum.stages, table {number}"
    return explained(where, UserError, mend="change it in that table") if number else nullcontext()


class RunError(Exception):
    """Something outside the configuration stopped a run (a full disk, a loss that is not finite).

    The command line prints the message without a traceback and exits with status 1.
    """


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
