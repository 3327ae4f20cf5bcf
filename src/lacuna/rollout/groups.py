"""Groups: the completions of a prompt, what they are worth, and what is told of them."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lacuna.config import OutageError
from lacuna.config.reinforcement import RewardsConfig, RolloutConfig
from lacuna.data import Loader
from lacuna.data.prompts import Prompt, prompts_of, row_of_prompt
from lacuna.model.build import BuiltModel
from lacuna.rollout.drawing import Completion
from lacuna.rollout.rewards import score, total
from lacuna.rollout.sampling import generate
from lacuna.rollout.verifiers import Answered, Reward


@dataclass
class Sample:
    """A completion, and what is known of it; lists have a value for each of its tokens.

    Attributes:
        prompt: the tokens of its prompt.
        tokens: its own, with the end if it `ended`.
        sampled: their log-probabilities as generating found them.
        source: the number of the source that the prompt is from.
        advantage: how much better it is than the others of its group.
        old: log-probabilities as training finds them before the first step on it.
        reference: those of the reference; empty without one.
        reward: what it is worth; nan where nothing says so.
        values: what the critic expects before each token; empty without one, as are
        advantages: how much better each token is than the critic expected;
        returns: what the critic should have expected.
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


@dataclass(frozen=True)
class Group:
    """The completions of a prompt, as text and as samples, and what each is worth.

    `scores` has what each function says of each; `rewards` are nan where no function applies.
    """

    prompt: str
    texts: list[str]
    samples: list[Sample]
    scores: dict[str, list[float]]
    rewards: list[float]

    @property
    def varies(self) -> bool:
        """Whether some completion is worth more than another."""
        return len({reward for reward in self.rewards if not math.isnan(reward)}) > 1

    def rows(self, step: int) -> list[dict[str, Any]]:
        """A row for each completion, as it is written to the run folder."""
        rows = []
        for number, sample in enumerate(self.samples):
            row: dict[str, Any] = {"step": step, "prompt": self.prompt}
            row |= {"completion": self.texts[number], "reward": _number(self.rewards[number])}
            row["scores"] = {name: _number(own[number]) for name, own in self.scores.items()}
            row |= {"advantage": sample.advantage, "tokens": len(sample.tokens)}
            rows.append(row | {"ended": sample.ended})
        return rows


def _number(value: float) -> float | None:
    """The value as JSON has it."""
    return None if math.isnan(value) else value


def draw_groups(
    policy: BuiltModel,
    source: Loader,
    functions: Mapping[str, Reward],
    ends: Sequence[int],
    rollout: RolloutConfig,
    rewards: RewardsConfig,
    seed: int,
    exchange: dist.ProcessGroup | None = None,
) -> list[Group]:
    """The groups of the next prompts of all ranks, on every rank, in the order of the data.

    Ranks have them minutes apart, and tell each other of them by the group `exchange`.
    """
    plan = source.plan
    asked, keys = _next_prompts(policy, source)
    prompts = [prompt.tokens for prompt in asked]
    said = generate(policy, prompts, keys, rollout, ends, seed, exchange)
    groups = []
    answers = []
    for prompt, completions in zip(asked, said, strict=True):
        row, where, number = row_of_prompt(prompt.document, plan.tokens, plan.sources)
        texts = [str(plan.tokenizer.decode(_without_end(one))) for one in completions]
        for one, text in zip(completions, texts, strict=True):
            left = rollout.max_tokens - len(one.tokens)
            answers.append(Answered(row, where, text, left))
        samples = [
            Sample(prompt.tokens, one.tokens, one.logprobs, one.ended, number)
            for one in completions
        ]
        asked_text = str(plan.tokenizer.decode(prompt.tokens))
        groups.append(Group(asked_text, texts, samples, {}, []))
    _add_rewards(groups, answers, functions, rewards)
    of_ranks: list[list[Group]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, groups, group=exchange)
    return [group for part in of_ranks for group in part]


@contextmanager
def put_back_on_outage(source: Loader) -> Iterator[None]:
    """A context that puts `source` back to where it was, where something needed is gone in it."""
    before = source.state_dict()
    try:
        yield
    except OutageError:
        source.load_state_dict(before)
        raise


def _next_prompts(policy: BuiltModel, source: Loader) -> tuple[list[Prompt], list[int]]:
    """This rank's next prompts, and the number of each among all prompts of the run."""
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
    return asked, keys


def _without_end(completion: Completion) -> list[int]:
    """The tokens of a completion but the one that ends it."""
    return completion.tokens[:-1] if completion.ended else completion.tokens


def _add_rewards(
    groups: Sequence[Group],
    answers: Sequence[Answered],
    functions: Mapping[str, Reward],
    settings: RewardsConfig,
) -> None:
    """Writes into the groups, in place, what their completions, the `answers`, are worth."""
    scores = score(functions, answers, settings)
    rewards = total(scores, settings)
    start = 0
    for group in groups:
        part = slice(start, start + len(group.texts))
        group.rewards.extend(rewards[part])
        group.scores.update({name: own[part] for name, own in scores.items()})
        start = part.stop


def statistics(groups: Sequence[Group]) -> dict[str, float | None]:
    """What the log has of groups: means over completions, and the share of groups that are flat.

    A group is flat if all its rewards are the same: nothing can be learnt from it.
    """
    samples = [sample for group in groups for sample in group.samples]
    told = {f"reward_{name}": _mean([*_of(groups, name)]) for name in groups[0].scores}
    rewards = [reward for group in groups for reward in group.rewards]
    deviations = [torch.tensor(group.rewards).std().item() for group in groups]
    return {
        "reward": _mean(rewards),
        "reward_deviation": _mean(deviations),
        **told,
        "flat_groups": sum(not group.varies for group in groups) / len(groups),
        "completion_tokens": _mean([len(sample.tokens) for sample in samples]),
        "ended": _mean([float(sample.ended) for sample in samples]),
    }


def _of(groups: Sequence[Group], name: str) -> list[float]:
    return [value for group in groups for value in group.scores[name]]


def _mean(values: Sequence[float]) -> float | None:
    """The mean of the values that are numbers; None without one."""
    found = [value for value in values if not math.isnan(value)]
    return sum(found) / len(found) if found else None


class CompletionsFile:
    """The file of a run folder that has every completion, with its reward and the step."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, "completions.jsonl")

    def go_on(self, step: int) -> None:
        """Drops the rows of later steps: a run that goes on after this one makes them anew."""
        if not self.path.exists():
            return
        # As bytes: a completion may hold characters that end a line of text.
        lines = self.path.read_bytes().splitlines(keepends=True)
        # Only the last line can be cut off, where a run was killed.
        whole = [line for line in lines if line.endswith(b"\n")]
        new = self.path.with_suffix(".new")
        new.write_bytes(b"".join(line for line in whole if json.loads(line)["step"] <= step))
        os.replace(new, self.path)

    def write(self, groups: Sequence[Group], step: int, leave_out: Sequence[str] = ()) -> None:
        """Adds the completions that a step begins with; what is not known of them is left out."""
        with open(self.path, "a", encoding="utf-8") as file:
            for group in groups:
                for row in group.rows(step):
                    for name in leave_out:
                        del row[name]
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
