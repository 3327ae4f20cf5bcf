"""What a user is told: the errors that mistakes raise, hints at what was meant, and the log."""

import difflib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

logger = logging.getLogger("lacuna")

# Variables in the environment of processes that lacuna itself has started: the id of the process
# that started them, and the open socket at which they find each other.
LAUNCHED = "LACUNA_LAUNCHED"
STORE = "LACUNA_STORE"


class UserError(Exception):
    """A mistake in the configuration or the input: what is wrong, where, and how to mend it.

    The command line prints the message without a traceback and exits with status 2.
    """


@contextmanager
def explained(what: str, *kinds: type[Exception], mend: str) -> Iterator[None]:
    """A context that turns errors of these kinds into a `UserError`.

    Its message says what is wrong, what the error says in its first line (and in its second where
    the first ends with a colon), and how to mend it.
    """
    try:
        yield
    except kinds as error:
        reason, _, more = str(error).strip().partition("\n")
        if reason.endswith(":"):
            reason += more.partition("\n")[0]
        reason = getattr(error, "strerror", None) or reason.rstrip(".")
        raise UserError(f"{what}: {' '.join(reason.split())}; {mend}") from error


def require_writable(folder: str, setting: str = "job.dump_folder") -> None:
    """Raises `UserError` if an output folder could not be made or written to, but makes nothing."""
    wrong = f"{setting}: cannot write to {folder!r}"
    with explained(wrong, OSError, mend="choose another folder"):
        path = Path(folder).absolute()
        there = next(one for one in (path, *path.parents) if one.exists())
        if not there.is_dir():
            raise UserError(f"{wrong}: {there} is a file; choose another folder.")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"{wrong}: {there} may not be written to; choose another folder.")


def make_folder(folder: str) -> None:
    """Makes an output folder, unless it is there. Raises `UserError` as `require_writable` does."""
    require_writable(folder)
    wrong = f"job.dump_folder: cannot write to {folder!r}"
    with explained(wrong, OSError, mend="choose another folder"):
        os.makedirs(folder, exist_ok=True)


def in_curriculum_stage(number: int) -> AbstractContextManager[None]:
    """A context in which a `UserError` names the stage of the curriculum too; 0 stands for none."""
    if number == 0:
        return nullcontext()
    where = f"curriculum.stages, table {number}"
    return explained(where, UserError, mend="change it in that table")


class RunError(Exception):
    """Something outside the configuration stopped a run (a full disk, a loss that is not finite).

    The command line prints the message without a traceback and exits with status 1.
    """


class OutageError(RunError):
    """Something that a step needs from elsewhere is gone; nothing of that step has been done yet.

    The loop saves what was before the step, from which the `way_on` leads.
    """

    way_on = "The same command goes on from there."


class UnansweredError(RunError):
    """Other ranks were waited for in vain: the rank that raises this is not the one to blame."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that proposes the known word most like `word`; empty if none is.

    A word that another begins with is like it, however much follows.
    """
    words = sorted(known)
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    found += [one for one in words if word and one.startswith(word)]
    return f"; did you mean {found[0]}?" if found else ""


def nearby(path: Path, others: Iterable[str] = ()) -> str:
    """A hint at what was meant by the path of a missing file: a similar name in its folder.

    It may also be one of `others`. Endings do not count: those of one kind are alike.
    """
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    names = [*others, *(neighbour.name for neighbour in path.parent.iterdir())]
    by_stem = {Path(name).stem: name for name in names}
    found = difflib.get_close_matches(path.stem, by_stem, n=1, cutoff=0.6)
    nothing = f"nothing in {path.parent.resolve()} resembles it"
    return f"did you mean {by_stem[found[0]]}?" if found else nothing
