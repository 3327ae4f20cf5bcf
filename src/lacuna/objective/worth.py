"""What says what completions are worth, and what becomes of those of which nothing says it."""

import math
import os
from collections.abc import Sequence

from lacuna.config import Config, OutageError
from lacuna.formats.finding import require_on_hub
from lacuna.rollout.groups import Group, Sample
from lacuna.rollout.reward_models import RewardModel
from lacuna.rollout.verifiers import Reward, find_rewards

# Batches of completions in a row of which none is worth anything, after which a run stops.
_MOST_UNJUDGED = 10


def functions_of(config: Config) -> dict[str, Reward]:
    """The functions and models that say what completions are worth.

    Raises `UserError` for those that cannot be had.
    """

    def as_model(name: str) -> RewardModel:
        if not os.path.isdir(name):
            require_on_hub(name, "rewards.functions: ")
        trusted = config.model.trust_remote_code
        return RewardModel(name, config.chat, config.rollout.batch_size, trusted)

    return find_rewards(config.rewards, as_model)


def is_judged(sample: Sample) -> bool:
    """Whether something says what a completion is worth."""
    return not math.isnan(sample.reward)


def unjudged_batches(groups: Sequence[Group], before: int) -> int:
    """How many batches in a row no reward has judged, with these groups after so many `before`.

    Raises `OutageError` where they are so many that the run learns nothing.
    """
    if not all(math.isnan(reward) for group in groups for reward in group.rewards):
        return 0
    if before + 1 >= _MOST_UNJUDGED:
        raise OutageError(
            "rewards.functions: no function has said what any completion of the last "
            f"{_MOST_UNJUDGED} batches is worth, so that nothing is learnt: mend what fails."
        )
    return before + 1
