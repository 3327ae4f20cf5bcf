"""What completions are worth: the weighted sum of what several functions say, which may fail."""

import math
import re
from collections.abc import Mapping, Sequence

from lacuna.config import OutageError, UserError, logger
from lacuna.config.reinforcement import RewardsConfig
from lacuna.rollout.asking import (
    Overdue,
    Unheard,
    WrongScores,
    ask,
    ask_alone,
    ask_together,
)
from lacuna.rollout.verifiers import Answered, AsyncReward, Reward

# What a function says of a completion on which it fails: no function may return it.
FAILED = -math.inf
_SHOWN = 200


def score(
    functions: Mapping[str, Reward], answers: Sequence[Answered], settings: RewardsConfig
) -> dict[str, list[float]]:
    """What each function says of each completion: nan if it does not apply, `FAILED` if it fails.

    Plain functions are asked one after the other, and then all coroutine functions at the same
    time; none where there is no completion, as on a rank that has no prompt. A function that fails
    on all completions together is asked again for each alone, to find out on which it fails. Raises
    `OutageError` that names the function and the sample where `on_error` is stop.
    """
    if not answers:
        return {name: [] for name in functions}
    awaited = {name: one for name, one in functions.items() if isinstance(one, AsyncReward)}
    found = {
        name: _scores_of(name, one, answers, settings)
        for name, one in functions.items()
        if name not in awaited
    }
    outcomes = []
    if awaited:
        outcomes = ask_together([*awaited.values()], answers, settings.timeout_seconds)
    for (name, one), outcome in zip(awaited.items(), outcomes, strict=True):
        if isinstance(outcome, Unheard):
            found[name] = _scores_of(name, one, answers, settings)
        elif isinstance(outcome, BaseException):
            found[name] = _scores_alone(name, one, answers, settings, outcome)
        else:
            found[name] = outcome
    return {name: found[name] for name in functions}


def longest_wait(settings: RewardsConfig, completions: int) -> float:
    """Seconds that `score` takes at most, where each function fails and is asked for each alone.

    Models that score, whose time is not limited, are taken to need no more than a function may.
    """
    seconds = max(settings.timeout_seconds, settings.code_seconds)
    return len(settings.functions) * (1 + completions) * seconds


def total(scores: Mapping[str, Sequence[float]], settings: RewardsConfig) -> list[float]:
    """The reward of each completion: the weighted sum of what applies; nan where nothing does.

    It is nan as well where a function failed: without its part the sum would be another reward than
    that of the completions beside it. Functions of weight 0 only tell something.
    """
    weights = settings.weights or (1.0,) * len(settings.functions)
    rewards = []
    for own in zip(*scores.values(), strict=True):
        pairs = zip(weights, own, strict=True)
        parts = [weight * value for weight, value in pairs if weight and not math.isnan(value)]
        is_judged = parts and not any(map(math.isinf, parts))
        rewards.append(sum(parts) if is_judged else math.nan)
    return rewards


def _scores_of(
    name: str, function: Reward, answers: Sequence[Answered], settings: RewardsConfig
) -> list[float]:
    try:
        return ask(function, answers, settings.timeout_seconds)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's own lines raise
        return _scores_alone(name, function, answers, settings, error)


def _scores_alone(
    name: str,
    function: Reward,
    answers: Sequence[Answered],
    settings: RewardsConfig,
    failure: BaseException,
) -> list[float]:
    """What a function says of each completion alone, after a `failure` on all together."""
    alone = []
    failed = 0
    said = ""
    outcomes = ask_alone(function, answers, settings.timeout_seconds)
    for answer, outcome in zip(answers, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            alone += outcome
            continue
        if settings.on_error == "stop":
            raise _explained(name, answer, outcome) from outcome
        failed += 1
        alone.append(FAILED)
        said = said or str(_explained(name, answer, outcome))
    if not failed:
        mend = "mend it"
        if isinstance(failure, Overdue):
            mend = "make it faster, or raise rewards.timeout_seconds"
        together = (
            f"rewards.functions: {name} fails on {len(answers)} completions together "
            f"({told(failure)}) and on none of them alone: {mend}."
        )
        if settings.on_error == "stop":
            raise OutageError(together) from failure
        logger.warning("%s", together)
    else:
        logger.warning("%s (%d of %d samples are left out)", said, failed, len(answers))
    return alone


def _explained(name: str, answer: Answered, error: BaseException) -> OutageError:
    """The message about a function that fails on a sample.

    What comes with lacuna raises `ValueError` or `re.error` for what the row has for it; a mended
    row is other data, which the run does not go on with.
    """
    is_of_row = ":" not in name and isinstance(error, ValueError | re.error)
    mend = "start a new run with that row mended" if is_of_row else "mend it"
    return OutageError(
        f"rewards.functions: {name} fails on {answer.where} with the completion "
        f"{shortened(answer.text)!r} "
        f"({told(error)}): {mend}, or set rewards.on_error = skip."
    )


def shortened(text: str) -> str:
    """The beginning of a text, for a message."""
    return text[:_SHOWN] + ("..." if len(text) > _SHOWN else "")


def told(error: BaseException) -> str:
    """What a failure is, for a message."""
    if isinstance(error, Overdue | WrongScores | Unheard | UserError):
        return str(error)
    return f"{type(error).__name__}: {error}"
