"""Prompts by success: those between come more often, the same on any ranks and after a kill."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lacuna.config import Config, UserError
from lacuna.config.contradictions import contradictions_of
from lacuna.config.documents import CurriculumConfig
from lacuna.objective.success import Successes
from lacuna.rollout.groups import Group
from policies import one_rank
from rewarded import KEYS, completions, flags, write_prompts
from runs import curve, ended, rows, start, steps, train, wait_until, weights

SHARES = ("prompts_new", "prompts_never_solved", "prompts_always_solved", "prompts_between")

ALONE = ("--rewards.functions", "pattern", "--rewards.length_margin", 32)
"""Flags: the answer alone decides."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 40 prompts every fifth is solved now and then; half of the others always, half never."""
    folder = write_prompts(tmp_path_factory.mktemp("prompts"))
    lines = []
    for number in range(40):
        answer = "" if number % 2 else "never"
        if number % 5 == 0:
            answer = "[a-zA-Z]"
        lines.append(json.dumps({"prompt": f"ask {number}", "answer": answer}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))
    return folder


def by_success(prompts: Path, *more: object) -> list[object]:
    return [*flags(prompts, *ALONE), "--curriculum.by_success", "true", *more]


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is a group of its own, as where prompts are drawn."""
    with one_rank():
        yield


def successes(documents: int = 6, decay: float = 0.5, size: int = 1) -> tuple[Successes, Any]:
    """What draws prompts, and a function that gives the numbers of the next."""
    found = Successes(CurriculumConfig(by_success=True, success_decay=decay), 1.0, seed=7)
    table = SimpleNamespace(
        lengths=np.array([3] * documents),
        document=lambda number: (SimpleNamespace(tokens=np.arange(3)), 0),
    )
    source: Any = SimpleNamespace(
        plan=SimpleNamespace(tokens=table), batch=SimpleNamespace(global_batch=size), rows_done=0
    )
    policy: Any = None

    return found, lambda: [one.document for one in found.next_prompts(policy, source)[0]]


def group(*rewards: float) -> Group:
    return Group("", [], [], {}, [*rewards])


@pytest.mark.usefixtures("alone")
def test_prompts_come_by_how_uncertain_it_is_that_a_completion_solves_them() -> None:
    found, draw = successes()
    found.counts = np.array([[0, 0, 4, 8, 2, 0], [0, 8, 8, 8, 8, 1]], dtype=np.float32)
    share = (found.counts[0] + 0.125) / (found.counts[1] + 0.25)
    wanted = share * (1 - share)
    assert wanted[0] == 0.25 == wanted.max() == wanted[2]
    drawn = np.bincount([draw()[0] for _ in range(20000)], minlength=6) / 20000
    assert drawn == pytest.approx(wanted / wanted.sum(), abs=0.012)


@pytest.mark.usefixtures("alone")
def test_earlier_completions_count_less_and_those_without_a_reward_as_unsolved() -> None:
    found, draw = successes(documents=1)
    for rewards in ((1.0, 1.0, 0.0, 1.2), (0.0, float("nan"), 0.5, 1.0)):
        assert draw() == [0]
        found.note([group(*rewards)])
    assert found.counts.tolist() == [[0.5 * 3 + 1], [0.5 * 4 + 4]]
    assert found.shares() == dict(zip(SHARES, (0, 0, 0, 1), strict=True))


@pytest.mark.usefixtures("alone")
def test_a_step_has_each_prompt_once_and_too_few_are_refused() -> None:
    _, draw = successes(size=6)
    assert sorted(draw()) == [*range(6)]
    _, draw = successes(size=7)
    with pytest.raises(UserError, match="a step has 7 prompts, each another one, and the data 6"):
        draw()


def test_fewer_groups_are_flat_and_all_prompts_are_tried(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    more = ("--optimizer.lr", 0, "--training.batch_size", 8, "--checkpoint.enable_checkpoint=false")
    train(world, tmp_path / "with", *by_success(prompts, *more, "--training.steps", 18))
    train(world, tmp_path / "without", *flags(prompts, *more, *ALONE, "--training.steps", 5))

    def flat(name: str, first: int) -> float:
        found = [row["flat_groups"] for row in rows(tmp_path / name) if "loss" in row]
        return sum(found[first:]) / len(found[first:])

    assert flat("with", 8) < flat("without", 0) - 0.2
    told = [row for row in rows(tmp_path / "with") if "loss" in row]
    for row in told:
        assert sum(row[name] for name in SHARES) == pytest.approx(1)
    last = [told[-1][name] for name in SHARES]
    assert last[0] == 0 and last[1] == pytest.approx(0.4, abs=0.08) and last[3] > 0.1
    assert len({row["prompt"] for row in completions(tmp_path / "with")}) == 40
    assert "prompts_new" not in rows(tmp_path / "without")[0]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_a_killed_run_draws_what_the_straight_run_draws(
    task: str, world: Path, prompts: Path, tmp_path: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    more = ("--job.task", task, f"--{task}.updates", 2, "--checkpoint.interval", 3)
    own = by_success(prompts, *more, "--training.steps", 14)
    train(world, straight, *own)
    with ended(start("train", world / "run.toml", "--job.dump_folder", killed, *own)) as process:
        wait_until(lambda: bool(steps(killed)), process)
        process.kill()
    assert steps(killed)[-1] < 14
    train(world, killed, *own)
    assert curve(straight, *KEYS, *SHARES) == curve(killed, *KEYS, *SHARES)
    assert completions(straight) == completions(killed)
    assert weights(straight) == weights(killed)


@pytest.mark.slow
def test_other_ranks_go_on_with_the_same_prompts(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    own = by_success(prompts, "--optimizer.lr", 1e-4, "--grpo.resample", 1)
    train(world, tmp_path / "straight", *own, "--training.steps", 6)
    train(world, tmp_path / "moved", *own, "--training.steps", 3)
    two = ("--cpus", 2, "--training.batch_size", 2)
    train(world, tmp_path / "moved", *own, *two, "--training.steps", 6)
    pairs = zip(completions(tmp_path / "straight"), completions(tmp_path / "moved"), strict=True)
    for one, other in pairs:
        assert [one[name] for name in ("step", "prompt", "completion", "reward")] == [
            other[name] for name in ("step", "prompt", "completion", "reward")
        ]
    assert curve(tmp_path / "straight", *SHARES) == curve(tmp_path / "moved", *SHARES)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"job": {"task": "sft"}}, "only prompts are solved or not"),
        ({"training": {"epochs": 1}}, "as often as they teach something"),
        ({"curriculum": {"difficulty_column": "level"}}, "two orders of the same prompts"),
        ({"curriculum": {"by_success": False, "success_decay": 0.9}}, "nothing else counts"),
        ({"data": {"streaming": True}}, "read from the cache"),
        ({"curriculum": {"rank_every": 2}}, "no loss to be ranked by"),
    ],
)
def test_settings_that_do_not_go_with_success_are_refused(
    settings: dict[str, dict[str, Any]], said: str
) -> None:
    def problems(**sections: dict[str, Any]) -> list[str]:
        tables: dict[str, dict[str, Any]] = {
            "job": {"task": "grpo"},
            "rewards": {"functions": ("exact",)},
            "training": {"seq_len": 512},
            "curriculum": {"by_success": True},
        }
        tables = tables | {name: tables.get(name, {}) | values for name, values in sections.items()}
        return [one for one in contradictions_of(Config(**tables)) if said in one]

    assert not problems()
    assert len(problems(**settings)) == 1


def test_sources_mixed_by_weight_are_refused(world: Path, prompts: Path, tmp_path: Path) -> None:
    both = f"{prompts / 'prompts.jsonl'},{prompts / 'prompts.jsonl'}"
    mixed = ("--data.dataset", both, "--data.data_probs", "0.5,0.5", "--data.dataset_split")
    said = train(world, tmp_path, *by_success(prompts, *mixed, "train,train"), status=2)
    assert "have no common order" in said
