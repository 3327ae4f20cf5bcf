"""The reward of answers that are mathematically equal to those of the rows."""

import math
from collections.abc import Sequence

from lacuna.config.reinforcement import RewardsConfig
from lacuna.rollout.asking import Overdue, deadline
from lacuna.rollout.verifiers import Answered, OwnTime

# Seconds to read the formula of a completion and to compare it.
_SECONDS = 5.0


class MathReward(OwnTime):
    """1 where math-verify finds the answer mathematically equal to that of the row, else 0.

    It is nan where the row has none. The formula in the completion is found by math-verify. One
    that cannot be compared in a few seconds, such as a power of a power of a power, is not equal:
    what a model writes must not end a run.
    """

    def __init__(self, settings: RewardsConfig) -> None:
        self.settings = settings

    def __call__(self, answers: Sequence[Answered]) -> list[float]:
        """A number for each. Raises `ValueError` where the answer of a row is no formula."""
        return [self._worth(answer) for answer in answers]

    def _worth(self, answer: Answered) -> float:
        from math_verify import parse, verify

        wanted = answer.row.get(self.settings.answer_column)
        if wanted is None:
            return math.nan
        # Its own timeouts would end ours: both use the alarm of the process.
        right = parse(str(wanted), parsing_timeout=None)
        right = right or parse(f"${wanted}$", parsing_timeout=None)
        if all(isinstance(one, str) for one in right):  # it is found, but not understood
            raise ValueError(f"{wanted!r} is no formula that math-verify can read")
        try:
            with deadline(_SECONDS):
                said = parse(answer.text, parsing_timeout=None)
                return float(verify(right, said, timeout_seconds=None))
        except Overdue:
            return 0.0
