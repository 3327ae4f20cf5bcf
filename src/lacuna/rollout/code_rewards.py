"""The reward of code: the tests of the row that the code of a completion passes."""

import json
import math
import os
import re
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from textwrap import dedent

from lacuna.config import UserError, explained, logger
from lacuna.config.cores import usable_cores
from lacuna.config.reinforcement import RewardsConfig
from lacuna.rollout.code_tests import Pair, Part, read_tests, value_of
from lacuna.rollout.sandbox import Limits, missing_protections, run
from lacuna.rollout.verifiers import Answered, OwnTime, answer_in

# Most that is read of what a process writes, beyond what is right.
_OUTPUT_BYTES = 2**20
# What reading and comparing a value raise where the code, not lacuna, wrote it.
_NONSENSE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
# A line that begins or ends a block of code, with the language.
_FENCE = re.compile(r"\s*```+\s*(\w*)[^`]*")
_PYTHON = ("python", "py", "python3")


def code_in(text: str, settings: RewardsConfig) -> str | None:
    """The code of a completion: what `answer_pattern` finds, or else its last block of Python.

    Where no block says that it is Python, it is the last one that does not say what it is.
    """
    if settings.answer_pattern is not None:
        return answer_in(text, settings.answer_pattern)
    blocks: list[tuple[str, str]] = []
    language: str | None = None
    inside: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line)
        if fence is None:
            inside.append(line)
        elif language is None or fence[1]:
            language, inside = fence[1].lower(), []
        else:
            blocks.append((language, dedent("\n".join(inside))))
            language = None
    for languages in (_PYTHON, ("",)):
        own = [code for language, code in blocks if language in languages]
        if own:
            return own[-1]
    return None


class CodeReward(OwnTime):
    """1 where the code of a completion passes all tests of its row, else 0, or their share.

    It is nan where the row has no tests, and 0 where a completion has no code.
    """

    def __init__(self, settings: RewardsConfig, is_share: bool) -> None:
        """Raises `UserError` where this system cannot shut in code, unless that is accepted."""
        self.settings = settings
        self.is_share = is_share
        memory = round(settings.code_memory_gib * 2**30)
        self.limits = Limits(settings.code_seconds, memory, settings.code_unprotected)
        _check_protections(self.limits)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.processes = settings.code_processes or max(1, usable_cores() // ranks)
        self.asked: Sequence[Answered] = ()
        self.found: dict[int, float | Exception] = {}

    def __call__(self, answers: Sequence[Answered]) -> list[float]:
        """The reward of each completion, several of which are run at a time.

        Raises `ValueError` for tests that are none, and `RuntimeError` or `OSError` where code
        cannot be run. Whoever asks again for one of the completions alone is told at once.
        """
        if any(id(answer) not in self.found for answer in answers):
            with ThreadPoolExecutor(self.processes) as pool:
                found = [*pool.map(self._found, answers)]
            self.found = dict(zip(map(id, answers), found, strict=True))
            self.asked = answers  # as long as they are kept, nothing else has their ids
        own = [self.found[id(answer)] for answer in answers]
        scores = [one for one in own if not isinstance(one, Exception)]
        if len(scores) < len(own):
            raise next(one for one in own if isinstance(one, Exception))
        return scores

    def _found(self, answer: Answered) -> float | Exception:
        try:
            return self._reward(answer)
        except (ValueError, RuntimeError, OSError) as error:
            return error

    def _reward(self, answer: Answered) -> float:
        column = answer.row.get(self.settings.tests_column)
        tests = [] if column is None else read_tests(column)
        pairs = [one for one in tests if isinstance(one, Pair)]
        parts = [one for one in tests if isinstance(one, Part)]
        if not tests:
            return math.nan
        code = code_in(answer.text, self.settings)
        if code is None:
            return 0.0
        verdicts = self._of_pairs(code, pairs) if pairs else self._of_parts(code, parts)
        return sum(verdicts) / len(verdicts) if self.is_share else float(all(verdicts))

    def _of_pairs(self, code: str, pairs: Sequence[Pair]) -> list[bool]:
        """Whether the code, as a program, writes what it should for each input.

        Each is a process of its own. No more are begun once all are known to be wrong.
        """
        verdicts = [False] * len(pairs)
        end = time.monotonic() + self.limits.seconds
        for number, pair in enumerate(pairs):
            left = replace(self.limits, seconds=end - time.monotonic())
            if left.seconds <= 0 or not (self.is_share or all(verdicts[:number])):
                break
            given = pair.given.encode(errors="surrogatepass")
            ended = run({"program": code}, given, left, len(pair.wanted) + _OUTPUT_BYTES)
            output = ended.output.decode(errors="replace")
            verdicts[number] = ended.status == 0 and pair.accepts(output)
        return verdicts

    def _of_parts(self, code: str, parts: Sequence[Part]) -> list[bool]:
        """Whether the code, as a module, passes each test; all are run in one process."""
        mark = secrets.token_hex()
        asked = [("run" if one.judge is None else "value", one.source) for one in parts]
        job = {"program": code, "mark": mark, "parts": asked}
        told: dict[int, object] = {}
        for line in run(job, b"", self.limits, _OUTPUT_BYTES).output.split(b"\n"):
            try:
                marked, number, value = json.loads(line)
                if marked == mark:
                    told.setdefault(number, value)
            except _NONSENSE:
                continue
        return [_is_right(one, told, place) for place, one in enumerate(parts) if one.is_test]


def _is_right(part: Part, told: dict[int, object], place: int) -> bool:
    if place not in told:
        return False
    try:
        return part.judge is None or part.judge(value_of(told[place]))
    except _NONSENSE:
        return False


@cache
def _check_protections(limits: Limits) -> None:
    """Raises `UserError` where this system cannot shut in code, unless that is accepted."""
    mend = "give it more, or mend Python there"
    with explained("rewards.functions: code", RuntimeError, OSError, mend=mend):
        missing = " and ".join(missing_protections(limits))
    if missing and not limits.unprotected:
        raise UserError(
            f"rewards.functions: on this system nothing keeps the code of completions from "
            f"{missing}: run where Linux has Landlock and seccomp, or accept that with "
            "rewards.code_unprotected."
        )
    if missing:
        logger.warning("nothing keeps the code of completions from %s", missing)
