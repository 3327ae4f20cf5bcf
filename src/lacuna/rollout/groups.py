"""Groups: the completions of a prompt, what they are worth, and what is told of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lacuna.config.reinforcement import RewardsConfig, RolloutConfig
from lacuna.data import Loader
from lacuna.data.plan import RowPlan
from lacuna.data.prompts import Prompt, columns_of_rows, prompts_of, rows_of_prompts
from lacuna.model.build import BuiltModel
from lacuna.rollout.failures import raised_on_all
from lacuna.rollout.rewards import FAILED, score, total
from lacuna.rollout.sampling import generate, part_of_rank
from lacuna.rollout.talks import Talk
from lacuna.rollout.turns import go_on
from lacuna.rollout.verifiers import Reward, require_columns

# Sums of several scores that differ by less, or by less of them, are the same but for rounding.
_ROUNDING = 1e-9


@dataclass
class Sample:
    """A completion, and what is known of it; lists have a value for each token of the model.

    Attributes:
        prompt: the tokens of its prompt.
        tokens: those of the model, of all its turns, with the ends of those that have one.
        sampled: their log-probabilities as generating found them.
        ended: whether it came to its end, and nothing cut it off.
        source: the number of the source that the prompt is from.
        advantage: how much better it is than the others of its group.
        old: log-probabilities as training finds them before the first step on it.
        reference: those of the reference; empty without one.
        reward: what it is worth; nan where nothing says so.
        values: what the critic expects before each token; empty without one, as are
        advantages: how much better each token is than the critic expected;
        returns: what the critic should have expected.
        given: what the model was given between its turns, and how many tokens it had said before.
    """

    prompt: list[int]
    tokens: list[int]
    sampled: list[float]
    ended: bool
    source: int = 0
    advantage: float = 0.0
    old: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    reward: float = 0.0
    values: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    given: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def after(self) -> list[int]:
        """All tokens that follow the prompt, in their order."""
        found: list[int] = []
        start = 0
        for place, tokens in self.given:
            found += self.tokens[start:place] + tokens
            start = place
        return found + self.tokens[start:]

    @property
    def is_own(self) -> np.ndarray:
        """Whether each token that follows the prompt is the model's, bool [tokens]."""
        if not self.given:
            return np.ones(len(self.tokens), dtype=bool)
        places = [place for place, tokens in self.given for _ in tokens]
        return np.insert(np.ones(len(self.tokens), dtype=bool), np.array(places, dtype=int), False)


@dataclass(frozen=True)
class Group:
    """The completions of a prompt, as text and as samples, and what each is worth.

    `scores` has what each function says of each; `rewards` are nan where no function applies.
    Where completions have several turns, `messages` has those of each, and `tool_errors` how many
    calls of tools failed in it; nan where nobody counts.
    """

    prompt: str
    texts: list[str]
    samples: list[Sample]
    scores: dict[str, list[float]]
    rewards: list[float]
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    tool_errors: list[float] = field(default_factory=list)

    @property
    def varies(self) -> bool:
        """Whether some completion is worth more than another, and not by rounding alone."""
        known = [reward for reward in self.rewards if not math.isnan(reward)]
        if not known:
            return False
        return not math.isclose(min(known), max(known), rel_tol=_ROUNDING, abs_tol=_ROUNDING)

    def note_rewards(self) -> None:
        """Writes into the samples, in place, what they are worth."""
        for sample, reward in zip(self.samples, self.rewards, strict=True):
            sample.reward = reward

    def rows(self, step: int) -> list[dict[str, Any]]:
        """A row for each completion, as it is written to the run folder."""
        rows = []
        for number, sample in enumerate(self.samples):
            row: dict[str, Any] = {"step": step, "prompt": self.prompt}
            row |= {"completion": self.texts[number], "reward": _number(self.rewards[number])}
            row["scores"] = {name: _number(own[number]) for name, own in self.scores.items()}
            row |= {"advantage": sample.advantage, "tokens": len(sample.tokens)}
            row["ended"] = sample.ended
            if self.messages:
                row["messages"] = self.messages[number]
            rows.append(row)
        return rows


def _number(value: float) -> float | None:
    """The value as JSON has it."""
    return None if math.isnan(value) else value


def draw_groups(
    policy: BuiltModel,
    plan: RowPlan,
    asked: Sequence[Prompt],
    keys: Sequence[int],
    functions: Mapping[str, Reward],
    ends: Sequence[int],
    rollout: RolloutConfig,
    rewards: RewardsConfig,
    seed: int,
    exchange: dist.ProcessGroup | None = None,
) -> list[Group]:
    """The groups of the prompts of all ranks, on every rank, in the order of the ranks.

    Each rank asks its own, which are prompts of the `plan`, and each has a key for its randomness.
    Ranks have the groups minutes apart, and tell each other of them by the group `exchange`.
    Raises on all ranks `OutageError` where a reward fails on one, and `UserError` where a reward
    applies to none, since no data has the column that it reads.
    """
    said = generate(policy, [one.tokens for one in asked], keys, rollout, ends, seed, exchange)
    talks: list[list[Talk]] = []
    origins = rows_of_prompts([one.document for one in asked], plan.tokens, plan.sources)
    for prompt, key, origin, completions in zip(asked, keys, origins, said, strict=True):
        talks.append([Talk(prompt.tokens, *origin, (key, n)) for n in range(len(completions))])
        for talk, one in zip(talks[-1], completions, strict=True):
            talk.hear(one, plan.tokenizer)
    flat = [talk for group in talks for talk in group]
    if rollout.takes_turns:
        room = plan.form.length
        go_on(policy, flat, rollout, rewards, room, ends, seed, plan.tokenizer, exchange)
    groups = [_group_of(one, str(plan.tokenizer.decode(one[0].prompt)), rollout) for one in talks]
    with raised_on_all(exchange):
        _add_rewards(groups, flat, functions, rollout.max_tokens, rewards)
        silent = [name for name in functions if all(map(math.isnan, _of(groups, name)))]
        if groups:
            require_columns(rewards, silent, lambda: {*chain(*map(columns_of_rows, plan.sources))})
    if dist.get_world_size() == 1:
        return groups
    of_ranks: list[list[Group]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, groups, group=exchange)
    return [group for part in of_ranks for group in part]


def _group_of(talks: Sequence[Talk], prompt: str, rollout: RolloutConfig) -> Group:
    """The group of the completions of a prompt, which nobody has judged yet."""
    samples = [
        Sample(one.prompt, one.tokens, one.logprobs, one.ended, one.source, given=one.given)
        for one in talks
    ]
    texts = ["\n".join(one.texts) for one in talks]
    messages = [one.messages for one in talks if rollout.takes_turns]
    errors = [one.tool_errors for one in talks if rollout.takes_turns]
    return Group(prompt, texts, samples, {}, [], messages, errors)


def next_prompts(policy: BuiltModel, source: Loader) -> tuple[list[Prompt], list[int]]:
    """This rank's next prompts, and the number of each among all prompts of the run.

    Ranks that share sequences read the same prompts, and each completes a part of them.
    """
    first = source.rows_done
    batches = source.next_step()
    first += policy.mesh.data_rank * sum(batch.shape[0] for batch in batches)
    asked = []
    keys = []
    for batch in batches:
        for prompt in prompts_of(batch):
            asked.append(prompt)
            keys.append(first + prompt.place)
        first += batch.shape[0]
    part = part_of_rank(policy.mesh, len(asked))
    return asked[part], keys[part]


def _add_rewards(
    groups: Sequence[Group],
    talks: Sequence[Talk],
    functions: Mapping[str, Reward],
    most: int,
    settings: RewardsConfig,
) -> None:
    """Writes into the groups, in place, what their completions, the `talks`, are worth.

    A completion has at most so many tokens. Where an environment failed it is worth nan.
    """
    answers = [one.answered(most) for one in talks]
    scores = score(functions, answers, settings)
    totals = total(scores, settings) if scores else [math.nan] * len(answers)
    rewards = [
        math.nan if one.has_failed else reward for one, reward in zip(talks, totals, strict=True)
    ]
    start = 0
    for group in groups:
        part = slice(start, start + len(group.texts))
        group.rewards.extend(rewards[part])
        group.scores.update({name: _numbers(own[part]) for name, own in scores.items()})
        start = part.stop


def _numbers(scores: Sequence[float]) -> list[float]:
    """Scores, nan where a function failed."""
    return [math.nan if one == FAILED else one for one in scores]


def statistics(groups: Sequence[Group]) -> dict[str, float | None]:
    """What the log has of groups: means over completions, and the share of groups that are flat.

    A group is flat if all its rewards are the same: nothing can be learnt from it.
    """
    samples = [sample for group in groups for sample in group.samples]
    told = {f"reward_{name}": _mean([*_of(groups, name)]) for name in groups[0].scores}
    rewards = [reward for group in groups for reward in group.rewards]
    judged = [[one for one in group.rewards if not math.isnan(one)] for group in groups]
    several = [own for own in judged if len(own) > 1]
    deviations = [torch.tensor(rewards).std().item() for rewards in several]
    turns = [1.0 + len(sample.given) for sample in samples]
    errors = _mean([number for group in groups for number in group.tool_errors])
    of_turns = {"turns": _mean(turns)} | ({} if errors is None else {"tool_errors": errors})
    return {
        "reward": _mean(rewards),
        "reward_deviation": _mean(deviations),
        **told,
        "flat_groups": sum(not group.varies for group in groups) / len(groups),
        "completion_tokens": _mean([len(sample.tokens) for sample in samples]),
        "ended": _mean([float(sample.ended) for sample in samples]),
        **(of_turns if groups[0].messages else {}),
    }


def _of(groups: Sequence[Group], name: str) -> list[float]:
    return [value for group in groups for value in group.scores[name]]


def _mean(values: Sequence[float]) -> float | None:
    """The mean of the values that are numbers; None without one."""
    found = [value for value in values if not math.isnan(value)]
    return sum(found) / len(found) if found else None
