"""The rewards that come with lacuna: exact or equal answers, patterns, format, length."""

import logging
import math
import os
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from inspect import iscoroutinefunction, signature
from typing import Any

from lacuna.config import UserError, explained
from lacuna.config.errors import did_you_mean
from lacuna.config.reinforcement import RewardsConfig
from lacuna.config.user_code import import_attribute


@dataclass(frozen=True)
class Answered:
    """A completion and the row of data that its prompt is from.

    Attributes:
        where: the place of the row, for messages.
        text: the completion without the token that ends it; of several turns, the last.
        left: how many tokens more it might have had.
        earlier: what the model said in the turns before.
        environment: what replied to the model, where something did.
    """

    row: dict[str, Any]
    where: str
    text: str
    left: int
    earlier: Sequence[str] = ()
    environment: Any = None

    @property
    def all_turns(self) -> str:
        """What the model said in all its turns, each in a line of its own."""
        return "\n".join([*self.earlier, self.text])


Reward = Callable[[Sequence[Answered]], Any]
"""Is asked for a number of each completion; None and nan mean that it does not apply."""


@dataclass(frozen=True)
class AsyncReward:
    """A reward that is awaited, beside others: what it returns is a coroutine."""

    function: Callable[[Sequence[Answered]], Awaitable[Any]]

    def __call__(self, answers: Sequence[Answered]) -> Awaitable[Any]:
        """The coroutine that finds a number for each completion."""
        return self.function(answers)


class OwnTime:
    """A reward that keeps its own time, and is not bound by rewards.timeout_seconds."""

    def __call__(self, answers: Sequence[Answered]) -> Sequence[Any]:
        """A number for each completion."""
        raise NotImplementedError


def answer_in(text: str, pattern: str) -> str | None:
    """The last match of a regular expression in a text, or its first group; None without one.

    Of alternatives with a group each it is the group of the one that matches.
    """
    matches = [*re.finditer(pattern, text, re.DOTALL)]
    if not matches:
        return None
    last = matches[-1]
    found = (group for group in last.groups() if group is not None)
    return next(found, None if last.re.groups else last[0])


def exact(answer: Answered, settings: RewardsConfig) -> float:
    """1 where the answer is that of the row, or one of a list, but for blanks around it, else 0.

    It is nan where the row has none.
    """
    wanted = answer.row.get(settings.answer_column)
    choices = wanted if isinstance(wanted, list | tuple) else [wanted]
    if wanted is None or not choices:
        return math.nan
    said: str | None = answer.text
    if settings.answer_pattern is not None:
        said = answer_in(answer.text, settings.answer_pattern)
    return float(said is not None and said.strip() in [_as_text(one) for one in choices])


def _as_text(wanted: Any) -> str:
    """An answer of a row as a model would write it; columns of numbers may have made 5 into 5.0.

    Raises `ValueError` for what is neither text nor number.
    """
    if not isinstance(wanted, str | int | float):
        raise ValueError(f"{wanted!r} is no answer: give a text, a number, or a list of these")
    is_whole = isinstance(wanted, float) and wanted.is_integer()
    return str(int(wanted) if is_whole else wanted).strip()


def pattern(answer: Answered, settings: RewardsConfig) -> float:
    """1 where the row's regular expression is found, else 0; nan where the row has none."""
    wanted = answer.row.get(settings.answer_column)
    if wanted is None:
        return math.nan
    if not isinstance(wanted, str | int | float):
        raise ValueError(f"{wanted!r} is no regular expression, which is a text")
    try:
        found = re.search(str(wanted), answer.text, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{wanted!r} is no regular expression: {error}") from error
    return float(found is not None)


def format_fits(answer: Answered, settings: RewardsConfig) -> float:
    """1 where the whole completion matches `rewards.format`, else 0."""
    return float(re.fullmatch(str(settings.format), answer.text, re.DOTALL) is not None)


def length(answer: Answered, settings: RewardsConfig) -> float:
    """0 for completions that leave the margin, down to -1 for those that leave no token.

    That is DAPO's punishment of overlong completions (arXiv 2503.14476, equation 13).
    """
    return min(0.0, answer.left / settings.length_margin - 1)


def of_environment(answer: Answered, settings: RewardsConfig) -> float:
    """What the environment says that the conversation is worth; nan where it has failed."""
    if answer.environment is None:
        return math.nan
    worth: float | None = answer.environment.reward()
    return math.nan if worth is None else worth


# Their names, and whether they are the share of tests that code passes.
_OF_CODE = {"code": False, "code_share": True}
_OWN = {
    "exact": exact,
    "pattern": pattern,
    "format": format_fits,
    "length": length,
    "environment": of_environment,
}


def find_rewards(settings: RewardsConfig, open_model: Callable[[str], Reward]) -> dict[str, Reward]:
    """The functions of `rewards.functions`, by their names.

    `open_model` makes one of the folder or the Hub id of a model. Raises `UserError` where there is
    none, one cannot be imported, or its settings are missing.
    """
    if settings.weights and len(settings.weights) != len(settings.functions):
        raise UserError(
            f"rewards.weights: there are {len(settings.weights)} for "
            f"{len(settings.functions)} rewards.functions: give one for each."
        )
    if settings.weights and not any(settings.weights):
        raise UserError("rewards.weights: all are 0, so that nothing is worth anything: raise one.")
    if repeated := {name for name in settings.functions if settings.functions.count(name) > 1}:
        raise UserError(f"rewards.functions: {min(repeated)} is named twice: leave one out.")
    if "math" in settings.functions:
        mend = "pip install -e '.[math]' -c constraints.txt, or leave it out"
        with explained("rewards.functions: math needs math-verify", ImportError, mend=mend):
            import_module("math_verify")
        # It says at each call that its timeouts are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
    found = {name: _find(name, settings, open_model) for name in settings.functions}
    _check_settings(settings)  # of functions that are there
    return found


def require_columns(
    settings: RewardsConfig, silent: Collection[str], columns: Callable[[], Collection[str]]
) -> None:
    """Raises `UserError` where a function reads a column that no data has.

    Only functions that are `silent`, whose scores are all nan, may be such. To find all `columns`
    may take reading all data.
    """
    readers = {"answer_column": ("exact", "pattern", "math"), "tests_column": (*_OF_CODE,)}
    for setting, names in readers.items():
        column = getattr(settings, setting)
        asking = [name for name in names if name in silent]
        if asking and column not in (known := columns()):
            raise UserError(
                f"rewards.{setting}: {asking[0]} reads the column {column}, and the data has "
                f"{', '.join(sorted(known))}: name one of these."
            )


def _check_settings(settings: RewardsConfig) -> None:
    """Raises `UserError` for settings that nothing takes, and expressions that are missing."""
    takers = {
        "format": ("format",),
        "answer_pattern": ("exact", *_OF_CODE),
        "answer_column": ("exact", "pattern", "math"),
        "length_margin": ("length",),
    }
    of_code = (
        "tests_column",
        *(name for name in type(settings).model_fields if name.startswith("code_")),
    )
    takers |= dict.fromkeys(of_code, (*_OF_CODE,))
    for setting, names in takers.items():
        is_changed = getattr(settings, setting) != type(settings).model_fields[setting].default
        if is_changed and not set(names) & set(settings.functions):
            taken = f"only {' and '.join(names)} take{'s' * (len(names) == 1)} it"
            raise UserError(f"rewards.{setting}: {taken}: name that in functions.")
    for setting in ("format", "answer_pattern"):
        value = getattr(settings, setting)
        with explained(f"rewards.{setting}: {value!r}", re.error, mend="mend the expression"):
            re.compile(value or "")
    if "format" in settings.functions and settings.format is None:
        raise UserError(
            "rewards.format: format needs a regular expression that completions should match."
        )


def _find(name: str, settings: RewardsConfig, open_model: Callable[[str], Reward]) -> Reward:
    """The function of this name, which takes completions with their rows."""
    if name in _OWN:
        verifier = _OWN[name]
        return lambda answers: [verifier(answer, settings) for answer in answers]
    if name == "math":
        from lacuna.rollout.math_reward import MathReward  # an extension

        return MathReward(settings)
    if name in _OF_CODE:
        from lacuna.rollout.code_rewards import CodeReward  # an extension

        return CodeReward(settings, _OF_CODE[name])
    if os.path.isdir(name) or "/" in name:
        return open_model(name)
    if ":" not in name:
        own = [*_OWN, "math", *_OF_CODE]
        known = f"{', '.join(own)}, module:function, or a folder or Hub id of a model that scores"
        hint = did_you_mean(name, own) or f"; give {known}."
        raise UserError(f"rewards.functions: there is no {name}{hint}")
    with explained(f"rewards.functions: {name}", ValueError, mend="give it as module:function"):
        found = import_attribute(name)
    if not callable(found):
        raise UserError(
            f"rewards.functions: {name} is no function: give one of rows and completions, which "
            "returns a number for each."
        )

    problem = f"rewards.functions: {name} cannot be called with rows and completions"
    mend = "let it take a list of each, and return a number for each completion"
    # What is written in C may not say what it takes.
    with explained(problem, TypeError, mend=mend), suppress(ValueError):
        signature(found).bind([], [])

    def given(answers: Sequence[Answered]) -> Any:
        rows = [dict(answer.row) for answer in answers]
        return found(rows, [answer.all_turns for answer in answers])

    is_async = iscoroutinefunction(found) or iscoroutinefunction(type(found).__call__)
    return AsyncReward(given) if is_async else given
