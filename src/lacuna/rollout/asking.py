"""Asks functions what completions are worth, one or several at a time, and for so long only."""

import asyncio
import math
import signal
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from inspect import isawaitable
from itertools import islice
from types import FrameType
from typing import Any

from lacuna.rollout.verifiers import Answered, AsyncReward, OwnTime, Reward

# Seconds for a coroutine to end once it is cancelled.
_GRACE = 0.5


class Overdue(BaseException):
    """A function takes too long; no `except Exception` of its own holds that up."""


class WrongScores(Exception):
    """A function does something other than to return a number for each completion."""


class Unheard(Exception):
    """Nothing is known of a function, because another one held up all."""


Outcome = list[float] | BaseException
"""What a function says of completions, or why it says nothing."""


def ask(function: Reward, answers: Sequence[Answered], seconds: float) -> list[float]:
    """What a function says of completions. Raises whatever it raises, and where it is too late."""
    if isinstance(function, AsyncReward):
        outcome = ask_together([function], answers, seconds)[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
    deadline = nullcontext() if isinstance(function, OwnTime) else _deadline(seconds)
    with deadline, _no_exit():
        return _numbers(function(answers), len(answers))


def ask_together(
    functions: Sequence[AsyncReward], answers: Sequence[Answered], seconds: float
) -> list[Outcome]:
    """What each coroutine function says of completions, all of them awaited at the same time.

    All are done after `seconds`, or cancelled, and so is whatever they began. One that does not
    give way to the others is interrupted as a plain function is, and those of which nothing is
    known by then are `Unheard`.
    """
    asking = _Asking([_answered(function, answers) for function in functions], seconds)
    loop = _event_loop()
    try:
        # Whoever gives way is told before the alarm; it rings again for those who hold up the end.
        with _deadline(seconds, 2 * _GRACE, again=_GRACE), _no_exit():
            is_empty = loop.run_until_complete(asking.run())
    except (Overdue, WrongScores) as error:  # between two coroutines, or of what one began
        is_empty = False
        asking.end = error
    if not is_empty:  # what is left on this loop must never run again
        _event_loop.cache_clear()
        loop.set_exception_handler(lambda loop, context: None)
        loop.close()
    return asking.outcomes()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all steps, so that the connections that functions keep stay usable."""
    return asyncio.new_event_loop()


class _Asking:
    """Coroutines that are awaited together, and what came of them.

    Attributes:
        end: what ended the waiting for all of them, if it was none of their own failures.
    """

    def __init__(self, coroutines: Sequence[Awaitable[list[float]]], seconds: float) -> None:
        self.coroutines = coroutines
        self.seconds = seconds
        self.tasks: list[asyncio.Future[list[float]]] = []
        self.late: set[asyncio.Future[list[float]]] = set()
        self.end: BaseException | None = None

    async def run(self) -> bool:
        """Awaits them, and cancels what is left; whether nothing is left after that."""
        own = asyncio.current_task()
        self.tasks = [asyncio.ensure_future(one) for one in self.coroutines]
        _, self.late = await asyncio.wait(self.tasks, timeout=self.seconds)
        left = asyncio.all_tasks() - {own}
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=_GRACE)
        return not left

    def outcomes(self) -> list[Outcome]:
        """What came of each, in order."""
        # Of all, because asyncio complains of errors that nobody reads.
        told = {task: _outcome(task) for task in self.tasks}
        known = [None if task in self.late else one for task, one in told.items()]
        held_up = self.end or next((one for one in known if isinstance(one, Overdue)), None)
        rest: BaseException = held_up or Overdue(_told(self.seconds))
        if held_up is not None and len(known) > 1:
            rest = Unheard()
        return [rest if one is None else one for one in known]


def _outcome(task: asyncio.Future[list[float]]) -> Outcome | None:
    """What came of a task; None where it is not done."""
    if not task.done():
        return None
    if task.cancelled():
        return WrongScores("it was cancelled")
    return task.exception() or task.result()


async def _answered(function: AsyncReward, answers: Sequence[Answered]) -> list[float]:
    with _no_exit():
        return _numbers(await function.function(answers), len(answers))


def _numbers(scores: Any, count: int) -> list[float]:
    """The numbers that a function returned for `count` completions; nan in place of None."""
    if isawaitable(scores):
        getattr(scores, "close", lambda: None)()
        raise WrongScores("it returned a coroutine: write it as async def")
    if isinstance(scores, str | bytes | dict | set | frozenset):
        raise WrongScores(f"it returned a {type(scores).__name__}, not a list of numbers")
    if not isinstance(scores, Iterable):
        raise WrongScores(f"it returned {scores!r}, not a list of numbers")
    found = [_number(value) for value in islice(scores, count + 1)]
    if len(found) != count:
        told = f"more than {count}" if len(found) > count else f"{len(found)}"
        raise WrongScores(f"it returned {told} scores for {count} completions")
    return found


def _number(value: Any) -> float:
    """A number of any library; one that stands alone in an array too, as models give scores."""
    if getattr(value, "ndim", 0):
        value = value.item()
    if isinstance(value, str | bytes):
        raise WrongScores(f"it returned {value!r}, which is no number")
    number = math.nan if value is None else float(value)
    if math.isinf(number):
        raise WrongScores(f"it returned {number}")
    return number


def _told(seconds: float) -> str:
    return f"it takes longer than rewards.timeout_seconds = {seconds:g}"


@contextmanager
def _no_exit() -> Iterator[None]:
    """A context in which a call of sys.exit is a failure, and not the end of the run."""
    try:
        yield
    except SystemExit as error:
        raise WrongScores(f"it called sys.exit({error.code!r})") from error


@contextmanager
def _deadline(seconds: float, more: float = 0.0, again: float = 0.0) -> Iterator[None]:
    """A context that raises `Overdue` when it takes `more` than so long, by this process's alarm.

    After that it does so each `again` seconds, unless that is 0. Of code that is not Python it
    interrupts only what looks for signals, such as waiting, reading and regular expressions.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise Overdue(_told(seconds))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds + more, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
