"""Held-out prompts: what the model in training answers, and which of them it solves."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from lacuna.config.reinforcement import RewardsConfig, RolloutConfig
from lacuna.data import HeldOut
from lacuna.data.mixture import random_key
from lacuna.data.prompts import prompt_of
from lacuna.model.build import BuiltModel
from lacuna.rollout.groups import Group, draw_groups, statistics
from lacuna.rollout.verifiers import Reward

# Tells the randomness of these completions from that of the completions that are trained on.
_STREAM = 5
# Rewards are sums of weighted numbers, of which 0.7 + 0.2 + 0.1 is a little less than 1.
_ROUNDING = 1e-6


def held_out_groups(
    policy: BuiltModel,
    held_out: HeldOut,
    functions: Mapping[str, Reward],
    ends: Sequence[int],
    rollout: RolloutConfig,
    rewards: RewardsConfig,
    seed: int,
    exchange: dist.ProcessGroup | None = None,
) -> list[Group]:
    """The groups of the held-out prompts, on every rank, in the order of the data.

    Of prompts as many are asked as `held_out.most` steps would take, if that is not None. Each has
    the same seeds in every call and in every layout. All ranks must call it; they tell each other
    of the groups by `exchange`.
    """
    plan = held_out.plan
    numbers = np.flatnonzero(plan.tokens.lengths)  # unreadable rows are empty
    if held_out.most is not None:
        numbers = numbers[: held_out.most * held_out.batch.global_batch]
    # Ranks beyond the last prompt ask it too: rewards are functions of at least one completion.
    share = math.ceil(len(numbers) / dist.get_world_size())
    first = dist.get_rank() * share
    own = [numbers[min(place, len(numbers) - 1)] for place in range(first, first + share)]
    sampling = {
        "samples": rollout.validation_samples,
        "temperature": rollout.validation_temperature,
    }
    asked = [prompt_of(int(number), plan.tokens) for number in own]
    keys = [prompt.document for prompt in asked]
    sampled = rollout.model_copy(update=sampling)
    own_seed = random_key(seed, _STREAM)
    how = (functions, ends, sampled, rewards, own_seed, exchange)
    return draw_groups(policy, plan, asked, keys, *how)[: len(numbers)]


def times_solved(group: Group, solved_at: float) -> int:
    """How many completions of a group solve its prompt: those without a reward do not."""
    return sum(reward >= solved_at - _ROUNDING for reward in group.rewards)


def held_out_row(groups: Sequence[Group], solved_at: float) -> dict[str, float | None]:
    """What the log has of held-out prompts, all with the same number of completions.

    That is what it has of those that are trained on, and pass@k: the share of prompts that one
    completion solves, on average, and the share that some of the k completions solve.
    """
    told = statistics(groups)
    row = {
        f"val_{name}": value
        for name, value in told.items()
        if name not in ("reward_deviation", "flat_groups")
    }
    solved = [times_solved(group, solved_at) for group in groups]
    samples = len(groups[0].rewards)
    row["val_pass_at_1"] = sum(solved) / samples / len(groups)
    row[f"val_pass_at_{samples}"] = sum(count > 0 for count in solved) / len(groups)
    return row
