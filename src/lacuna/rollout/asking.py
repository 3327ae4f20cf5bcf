"""Asks functions what completions are worth, one or several at a time, and for so long only."""

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from inspect import isawaitable
from itertools import islice
from types import FrameType
from typing import Any, Generic, TypeVar

from lacuna.config import logger
from lacuna.rollout.verifiers import Answered, AsyncReward, OwnTime, Reward

# Seconds for a function to end once it is told to.
GRACE = 0.5
# Seconds for coroutines to close what they have open, once they are cancelled.
_CLOSING = 5.0
# Failures in a row on single samples for want of time, after which no more samples are asked about.
_MOST_OVERDUE = 3
# Alarms that a function may go on after, one every GRACE seconds.
_MOST_ALARMS = 20
# Squares of larger rewards, and of the gradients that they make, are not finite.
_LARGEST = 1e12


class Overdue(BaseException):
    """A function takes too long; no `except Exception` of its own holds that up."""


class WrongScores(Exception):
    """A function does something other than to return a number for each completion."""


class Unheard(Exception):
    """Nothing is known of a function, which was not asked, or was held up by another one."""


T = TypeVar("T")
Outcome = list[float] | BaseException
"""What a function says of completions, or why it says nothing."""


def ask(function: Reward, answers: Sequence[Answered], seconds: float) -> list[float]:
    """What a function says of completions. Raises whatever it raises, and where it is too late."""
    if isinstance(function, AsyncReward):
        outcome = ask_together([function], answers, seconds)[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
    is_timed = not isinstance(function, OwnTime)
    with deadline(seconds, again=GRACE) if is_timed else nullcontext(), no_exit():
        return _numbers(function(answers), len(answers))


def ask_together(
    functions: Sequence[AsyncReward], answers: Sequence[Answered], seconds: float
) -> list[Outcome]:
    """What each coroutine function says of completions, all of them awaited at the same time."""
    return await_together([_answered(function, answers) for function in functions], seconds)


def ask_alone(function: Reward, answers: Sequence[Answered], seconds: float) -> Iterator[Outcome]:
    """What a function says of each completion by itself, one after the other.

    Coroutines are awaited together. Of a function that was overdue several times in a row no more
    is asked.
    """
    known: list[Outcome] = [Unheard()] * len(answers)
    if isinstance(function, AsyncReward):
        known = await_together([_answered(function, [answer]) for answer in answers], seconds)
    overdue = 0
    for answer, outcome in zip(answers, known, strict=True):
        if isinstance(outcome, Unheard) and overdue < _MOST_OVERDUE:
            outcome = _heard(function, answer, seconds)
            overdue = overdue + 1 if isinstance(outcome, Overdue) else 0
        yield outcome


def _heard(function: Reward, answer: Answered, seconds: float) -> Outcome:
    """What a function says of one completion, or what it raises."""
    try:
        return ask(function, [answer], seconds)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's own lines raise
        return error


def await_together(coroutines: Sequence[Awaitable[T]], seconds: float) -> list[T | BaseException]:
    """What each coroutine returns, or why it does not, all of them awaited at the same time.

    All are done after `seconds`, or cancelled, and so is whatever they began. One that does not
    give way to the others is interrupted, and those of which nothing is known by then are
    `Unheard`.
    """
    asking = _Asking(coroutines, seconds)
    loop = _event_loop()
    try:
        # Whoever gives way is told before the alarm; it rings again for those who hold up the end.
        with deadline(seconds, GRACE + _CLOSING, again=GRACE), no_exit():
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


class _Asking(Generic[T]):
    """Coroutines that are awaited together, and what came of them.

    Attributes:
        end: what ended the waiting for all of them, if it was none of their own failures.
    """

    def __init__(self, coroutines: Sequence[Awaitable[T]], seconds: float) -> None:
        self.coroutines = coroutines
        self.seconds = seconds
        self.tasks: list[asyncio.Future[T]] = []
        self.late: set[asyncio.Future[T]] = set()
        self.end: BaseException | None = None

    async def run(self) -> bool:
        """Awaits them, and cancels what is left; whether nothing is left after that."""
        own = asyncio.current_task()
        self.tasks = [asyncio.ensure_future(_guarded(one)) for one in self.coroutines]
        _, self.late = await asyncio.wait(self.tasks, timeout=self.seconds)
        left = asyncio.all_tasks() - {own}
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=_CLOSING)
        return not left

    def outcomes(self) -> list[T | BaseException]:
        """What came of each, in order."""
        # Of all, because asyncio complains of errors that nobody reads.
        told = {task: _outcome(task) for task in self.tasks if task.done()}
        heard = {task: one for task, one in told.items() if task not in self.late}
        ends = (one for one in heard.values() if isinstance(one, Overdue))
        held_up = self.end or next(ends, None)
        rest: BaseException = held_up or Overdue(_told(self.seconds))
        if held_up is not None and len(self.tasks) > 1:
            rest = Unheard("another one held it up")
        return [heard.get(task, rest) for task in self.tasks]


def _outcome(task: asyncio.Future[Any]) -> Any:
    """What a task that is done returned, or the exception that it raised."""
    if task.cancelled():
        return WrongScores("it was cancelled")
    return task.exception() or task.result()


async def _guarded(coroutine: Awaitable[T]) -> T:
    with no_exit():
        return await coroutine


async def _answered(function: AsyncReward, answers: Sequence[Answered]) -> list[float]:
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
    if abs(number) > _LARGEST:
        raise WrongScores(f"it returned {number}, beyond what can be learnt from ({_LARGEST:g})")
    return number


def _told(seconds: float) -> str:
    return f"it takes longer than rewards.timeout_seconds = {seconds:g}"


def _end_process(frame: FrameType | None) -> None:
    """Ends this process, as nothing else ends code that catches whatever is raised in it."""
    where = f"{frame.f_code.co_filename}, line {frame.f_lineno}" if frame else "it"
    logger.error(
        "a function in rewards.functions or rollout.environment takes too long, catches whatever "
        "interrupts it and goes on (%s): the run is ended at once. Let it catch Exception, not "
        "BaseException; the same command goes on from the last checkpoint.",
        where,
    )
    os._exit(1)


@contextmanager
def no_exit() -> Iterator[None]:
    """A context in which a call of sys.exit is a failure, and not the end of the run."""
    try:
        yield
    except SystemExit as error:
        raise WrongScores(f"it called sys.exit({error.code!r})") from error


@contextmanager
def deadline(seconds: float, more: float = 0.0, again: float = 0.0) -> Iterator[None]:
    """A context that raises `Overdue` when it takes `more` than so long, by this process's alarm.

    After that it does so each `again` seconds, unless that is 0, and ends the process where code
    catches that time after time. Of code that is not Python it interrupts only what looks for
    signals, such as waiting, reading and regular expressions.
    """
    alarms = 0

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal alarms
        alarms += 1
        if alarms > _MOST_ALARMS:
            _end_process(frame)
        raise Overdue(_told(seconds))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds + more, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
