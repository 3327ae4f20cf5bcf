"""The environment of the documentation is one, and a model learns to use what replies to it."""

import importlib
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from lacuna.config import OutageError
from lacuna.config.reinforcement import RewardsConfig, RolloutConfig
from lacuna.rollout.environment import find_environment
from lacuna.rollout.rewards import score
from lacuna.rollout.verifiers import Answered, find_rewards
from rewarded import completions
from runs import SOURCE, rows, train
from talking import flags, talker, write_talks

CALCULATOR = """
class Adder:
    def __init__(self, row, seed):
        self.answer = row["answer"]
        self.last = ""

    def reply(self, text):
        self.last = text
        words = text.split()
        if words[:1] != ["add"]:
            return None
        return [{"role": "tool", "content": str(sum(int(one) for one in words if one.isdigit()))}]

    def reward(self):
        return self.last.strip() == self.answer
"""


def example() -> str:
    """The code in the documentation."""
    [code] = re.findall(
        "```python\n(.*?)```", (SOURCE.parent / "docs" / "tools.md").read_text(), re.S
    )
    return code


def test_the_example_of_the_documentation_works_out_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 20 <= len(example().splitlines()) <= 30
    (tmp_path / "calculator.py").write_text(example())
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    made_by = find_environment(RolloutConfig(environment="calculator:Calculator"), talker())
    found = made_by({"answer": "87"}, 5)
    assert found.reply("So <calc>12 * 7</calc> comes first.") == [{"role": "user", "content": "84"}]
    assert found.reply("<calc>84 + 3</calc>") == [{"role": "user", "content": "87"}]
    assert found.reply(" 87 ") is None and found.reward() == 1


def test_a_run_has_the_example_of_the_documentation_for_an_environment(
    world: Path, tmp_path: Path
) -> None:
    talks = write_talks(tmp_path / "talks")
    (talks / "calculator.py").write_text(example())
    own = flags(talks, "--rollout.environment", "calculator:Calculator", "--training.steps", 1)
    train(world, tmp_path / "run", *own, "--rewards.functions", "environment", cwd=talks)
    assert {row["scores"]["environment"] for row in completions(tmp_path / "run")} <= {0, 1}


class Worth:
    """An environment that is over."""

    def __init__(self, worth: Any) -> None:
        self.worth = worth

    def reward(self) -> Any:
        return self.worth


def words(rows: list[dict], completions: list[str]) -> list[int]:
    return [len(said.split()) for said in completions]


def test_the_last_answer_is_judged_and_functions_of_ones_own_are_given_all() -> None:
    own = f"{__name__}:words"
    settings = RewardsConfig(functions=("exact", "environment", own))
    answers = [
        Answered({"answer": "7"}, "row 1", " 7", 3, ("add 3 4", "and 5"), Worth(0.5)),
        Answered({"answer": "add"}, "row 2", "7", 3, ("add",), Worth(None)),
        Answered({"answer": "7"}, "row 3", "7", 3),
    ]
    found = score(find_rewards(settings, lambda name: None), answers, settings)
    assert found["exact"] == [1, 0, 1] and found[own] == [6, 2, 1]
    assert found["environment"] == pytest.approx([0.5, math.nan, math.nan], nan_ok=True)


def test_a_text_is_no_number_that_an_environment_may_say() -> None:
    answers = [Answered({}, "row 1", "7", 3, ("add",), Worth("0.5"))]
    settings = RewardsConfig(functions=("environment",))
    with pytest.raises(OutageError, match="it returned '0.5', which is no number"):
        score(find_rewards(settings, lambda name: None), answers, settings)


def write_lessons(path: Path) -> None:
    """Conversations in which every second question is answered by what the tool says."""
    generator = random.Random(0)
    lines = []
    for number in range(400):
        first, second = generator.randrange(10), generator.randrange(10)
        messages = [{"role": "user", "content": f"{first} plus {second}"}]
        if number % 2:
            messages.append({"role": "assistant", "content": f"add {first} {second}"})
            messages.append({"role": "tool", "content": str(first + second)})
            messages.append({"role": "assistant", "content": str(first + second)})
        else:
            messages.append({"role": "assistant", "content": str(generator.randrange(19))})
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines))


@pytest.mark.slow
def test_a_model_learns_to_ask_its_environment(world: Path, tmp_path: Path) -> None:
    talks = write_talks(tmp_path / "talks")
    write_lessons(talks / "lessons.jsonl")
    (talks / "prompts.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{first} plus {second}", "answer": str(first + second)}) + "\n"
            for first in range(10)
            for second in range(10)
        )
    )
    (talks / "adding.py").write_text(CALCULATOR)
    sft = ("--job.task", "sft", "--data.dataset", talks / "lessons.jsonl", "--training.seq_len", 48)
    base = ("--model.config", talks / "model", "--chat.template", talks / "chat.jinja")
    taught = ("--training.steps", 300, "--training.batch_size", 8, "--optimizer.lr", 5e-3)
    train(world, tmp_path / "taught", *base, *sft, *taught)
    own = flags(
        talks, "--rollout.environment", "adding:Adder", "--rewards.functions", "environment"
    )
    own += ["--model.name_or_path", tmp_path / "taught" / "hf", "--optimizer.lr", 1e-3]
    own += ["--training.steps", 60, "--training.batch_size", 8, "--rollout.samples", 8]
    for name, more in {"grpo": (), "ppo": ("--job.task", "ppo", "--ppo.beta", 0)}.items():
        train(world, tmp_path / name, *own, *more, cwd=talks)
        found = [row for row in rows(tmp_path / name) if "loss" in row]
        rewards = [row["reward"] for row in found]
        assert sum(rewards[-20:]) / 20 > sum(rewards[:5]) / 5 + 0.15, rewards
        turns = [row["turns"] for row in found]
        assert turns[0] < 1.7 and turns[-1] > 1.85, turns
