"""What completions are worth: the weighted sum of what several functions say, which may fail."""

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from lacuna.config import UserError, logger
from lacuna.config.reinforcement import RewardsConfig
from lacuna.rollout.verifiers import Answered, Reward

_SHOWN = 200


class Overdue(BaseException):
    """A function takes too long; no `except Exception` of its own holds that up."""


class _WrongScores(Exception):
    """A function returns something other than a number for each completion."""


def score(
    functions: Mapping[str, Reward], answers: Sequence[Answered], settings: RewardsConfig
) -> dict[str, list[float]]:
    """What each function says of each completion; nan where it does not apply, or failed.

    A function that fails on all completions together is asked again for each alone, to find out on
    which it fails. Raises `UserError` that names the function and the sample where `on_error` is
    stop.
    """
    return {name: _scores_of(name, one, answers, settings) for name, one in functions.items()}


def total(scores: Mapping[str, Sequence[float]], settings: RewardsConfig) -> list[float]:
    """The reward of each completion: the weighted sum of what applies; nan where nothing does."""
    weights = settings.weights or (1.0,) * len(settings.functions)
    rewards = []
    for own in zip(*scores.values(), strict=True):
        pairs = zip(weights, own, strict=True)
        parts = [weight * value for weight, value in pairs if not math.isnan(value)]
        rewards.append(sum(parts) if parts else math.nan)
    return rewards


def _scores_of(
    name: str, function: Reward, answers: Sequence[Answered], settings: RewardsConfig
) -> list[float]:
    try:
        return _ask(function, answers, settings.timeout_seconds)
    except (Exception, Overdue) as error:  # whatever the user's own lines raise
        failure = error
    alone = []
    failed = 0
    for answer in answers:
        try:
            alone += _ask(function, [answer], settings.timeout_seconds)
        except (Exception, Overdue) as error:
            if settings.on_error == "stop":
                raise _explained(name, answer, error) from error
            failed += 1
            alone.append(math.nan)
            said = str(_explained(name, answer, error))
    if not failed and settings.on_error == "stop":
        raise UserError(
            f"rewards.functions: {name} fails on {len(answers)} completions together "
            f"({told(failure)}) and on none of them alone: mend it, and the same command goes on."
        ) from failure
    if failed:
        logger.warning("%s (%d of %d samples are left out)", said, failed, len(answers))
    return alone


def _explained(name: str, answer: Answered, error: BaseException) -> UserError:
    """The message about a function that fails on a sample."""
    return UserError(
        f"rewards.functions: {name} fails on {answer.where} with the completion "
        f"{shortened(answer.text)!r} "
        f"({told(error)}): mend it, and the same command goes on; or set rewards.on_error = skip."
    )


def shortened(text: str) -> str:
    """The beginning of a text, for a message."""
    return text[:_SHOWN] + ("..." if len(text) > _SHOWN else "")


def told(error: BaseException) -> str:
    """What a failure is, for a message."""
    if isinstance(error, Overdue | _WrongScores):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _ask(function: Reward, answers: Sequence[Answered], seconds: float) -> list[float]:
    """What a function says of completions. Raises whatever it raises, and where it is too late."""
    with deadline(seconds):
        scores = [*function(answers)]
    if len(scores) != len(answers):
        raise _WrongScores(f"it returned {len(scores)} scores for {len(answers)} completions")
    found = []
    for value in scores:
        number = math.nan if value is None else float(value)
        if math.isinf(number):
            raise _WrongScores(f"it returned {number}")
        found.append(number)
    return found


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """A context that raises `Overdue` when it takes longer, by an alarm of this process.

    Of code that is not Python it interrupts only what looks for signals, such as waiting, reading
    and regular expressions.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise Overdue(f"it takes longer than rewards.timeout_seconds = {seconds:g}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
