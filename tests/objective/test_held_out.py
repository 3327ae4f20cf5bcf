"""Held-out prompts: answered by the model as it is, told right, and without effect on training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lacuna.objective.held_out import held_out_row
from lacuna.rollout.groups import Group, Sample
from rewarded import KEYS, SHARED_LAYOUTS, completions, flags, write_prompts
from runs import curve, ended, refused, rows, start, steps, train, wait_until, weights


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_prompts(tmp_path_factory.mktemp("prompts"))
    held_out = [{"prompt": f"tell {number}", "answer": "[a-zA-Z]"} for number in range(5)]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(one) + "\n" for one in held_out))
    return folder


def held_out(prompts: Path, *more: object) -> list[object]:
    """The flags of a run that answers held-out prompts every second step."""
    dataset = ("--validation.dataset", prompts / "held_out.jsonl", "--validation.dataset_split")
    return flags(prompts, *dataset, "train", "--validation.freq", 2, *more)


def answers(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "validation_completions.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def measured(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder) if "val_reward" in row]


def test_the_model_as_it_is_answers_and_training_stays_the_same(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    more = ("--training.steps", 5, "--optimizer.lr", 1e-2)
    said = train(world, tmp_path / "with", *held_out(prompts, *more))
    train(world, tmp_path / "without", *flags(prompts, *more))
    assert curve(tmp_path / "with", *KEYS) == curve(tmp_path / "without", *KEYS)
    assert completions(tmp_path / "with") == completions(tmp_path / "without")
    assert weights(tmp_path / "with") == weights(tmp_path / "without")
    assert "validation reward" in said and "tokens a completion" in said
    found = measured(tmp_path / "with")
    assert [row["step"] for row in found] == [0, 2, 4, 5]
    kept = answers(tmp_path / "with")
    for row in found:
        own = [one for one in kept if one["step"] == row["step"]]
        assert [one["prompt"] for one in own] == [f"tell {number}" for number in range(5)]
        assert row["val_reward"] == pytest.approx(sum(one["reward"] for one in own) / 5)
        for name in ("pattern", "length"):
            mean = sum(one["scores"][name] for one in own) / 5
            assert row[f"val_reward_{name}"] == pytest.approx(mean)
        assert row["val_pass_at_1"] == sum(one["reward"] >= 1 for one in own) / 5
        assert row["val_completion_tokens"] == sum(one["tokens"] for one in own) / 5
        assert row["val_ended"] == sum(one["ended"] for one in own) / 5
    assert len({one["completion"] for one in kept}) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "with" / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "with" / "hf")
    for one in kept[-5:]:
        ids = torch.tensor([tokenizer(one["prompt"]).input_ids])
        greedy = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        after = [token for token in greedy[0, ids.shape[1] :].tolist() if token != 256]
        assert tokenizer.decode(after) == one["completion"]


@pytest.mark.slow
def test_several_completions_are_the_same_on_any_number_of_ranks(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    sampled = ("--rollout.validation_samples", 3, "--rollout.validation_temperature", 1)
    own = held_out(prompts, *sampled, "--training.steps", 2, "--optimizer.lr", 1e-3)
    own += ["--rewards.solved_at", -0.9]
    train(world, tmp_path / "one", *own)
    train(world, tmp_path / "two", *own, "--cpus", 2, "--training.batch_size", 2)
    assert [one["prompt"] for one in answers(tmp_path / "one")[:4]] == ["tell 0"] * 3 + ["tell 1"]
    assert answers(tmp_path / "one") == answers(tmp_path / "two")
    train(world, tmp_path / "shared", *own, *SHARED_LAYOUTS["cp 2, ring"])
    assert answers(tmp_path / "one") == answers(tmp_path / "shared")
    first, other = measured(tmp_path / "one"), measured(tmp_path / "two")
    assert first == other and 0 < first[0]["val_pass_at_1"] < first[0]["val_pass_at_3"]
    solved = [one["reward"] >= -0.9 for one in answers(tmp_path / "one")[:15]]
    assert first[0]["val_pass_at_1"] == pytest.approx(sum(solved) / 15)
    groups = [solved[number : number + 3] for number in range(0, 15, 3)]
    assert first[0]["val_pass_at_3"] == sum(any(group) for group in groups) / 5


def test_more_ranks_than_prompts_and_fewer_steps_than_prompts(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    own = held_out(prompts, "--training.steps", 1)
    (tmp_path / "one.jsonl").write_text('{"prompt": "tell", "answer": "a"}\n')
    single = ("--validation.dataset", tmp_path / "one.jsonl", "--cpus", 2)
    train(world, tmp_path / "few", *own, *single, "--training.batch_size", 2)
    assert [one["step"] for one in answers(tmp_path / "few")] == [0, 1]
    train(world, tmp_path / "steps", *own, "--validation.steps", 1)
    asked = [one["prompt"] for one in answers(tmp_path / "steps") if one["step"] == 0]
    assert asked == [f"tell {number}" for number in range(4)], "a step has four prompts"


def test_ppo_answers_held_out_prompts_too_and_keeps_the_best(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    more = ("--job.task", "ppo", "--optimizer.lr", 0, "--checkpoint.keep_best", "true")
    own = held_out(prompts, *more, "--validation.patience", 2, "--training.steps", 9)
    said = train(world, tmp_path, *own)
    found = measured(tmp_path)
    assert [row["step"] for row in found] == [0, 2, 4], "nothing gets better"
    reward = found[0]["val_reward"]
    assert {row["val_reward"] for row in found} == {reward}
    assert f"best validation reward: {reward:.4f}, after step 0" in said
    assert "nothing better in 2 validations" in said


@pytest.mark.slow
def test_a_killed_run_has_each_validation_once(world: Path, prompts: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    more = ("--grpo.updates", 3, "--training.steps", 12, "--checkpoint.interval", 2)
    own = held_out(prompts, *more)
    train(world, straight, *own)
    with ended(start("train", world / "run.toml", "--job.dump_folder", killed, *own)) as process:
        wait_until(lambda: bool(steps(killed)), process)
        process.kill()
    assert steps(killed)[-1] < 12
    # As of a run that was killed later than it was.
    with open(killed / "validation_completions.jsonl", "a") as file:
        file.write(json.dumps({"step": 12, "prompt": "lost"}) + '\n{"step": 12, "pro')
    train(world, killed, *own)
    assert curve(straight, *KEYS) == curve(killed, *KEYS)
    assert answers(straight) == answers(killed)
    assert measured(straight) == measured(killed)
    assert weights(straight) == weights(killed)


def test_completions_to_which_nothing_applies_are_not_solved_and_not_in_the_mean() -> None:
    sample = Sample([1], [2, 3], [0.0, 0.0], ended=True)
    rewards = [[1.0, float("nan")], [0.7 + 0.2 + 0.1, 0.0]]
    groups = [Group("", ["a", "b"], [sample] * 2, {"exact": own}, own) for own in rewards]
    row = held_out_row(groups, solved_at=1.0)
    assert row["val_reward"] == pytest.approx(2 / 3)
    assert row["val_pass_at_1"] == 0.5 and row["val_pass_at_2"] == 1
    nothing = [Group("", ["a"], [sample], {"exact": [float("nan")]}, [float("nan")])]
    assert held_out_row(nothing, 1.0)["val_reward"] is None


def test_held_out_prompts_that_leave_no_room_are_refused_before_the_run(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 30, "answer": "a"}) + "\n")
    own = held_out(prompts, "--validation.dataset", tmp_path / "long.jsonl")
    said = train(world, tmp_path / "run", *own, status=2)
    assert "prompts have more than 32 - 5 = 27 tokens, the longest 30" in said
    vain = refused("train", world / "run.toml", *flags(prompts, "--validation.patience", 2))
    assert "needs the validation loss" in vain
