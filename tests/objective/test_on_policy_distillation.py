"""Distillation on a student's own completions: exact, alike in every layout, refused by name."""

import json
import math
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lacuna.config import Config
from lacuna.config.contradictions import contradictions_of
from own_completions import CASES, gradients_of, step_by_lacuna, student_and_teacher
from rewarded import SHARED_LAYOUTS, completions, write_prompts
from runs import (
    SOURCE,
    as_stopped,
    curve,
    ended,
    lacuna,
    rows,
    start,
    steps,
    train,
    wait_until,
    weights,
    write_model,
)
from tiny import VOCABULARY, random_model

KEYS = ("loss", "grad_norm", "completion_tokens", "ended", "mismatch_mean", "tokens")
"""What two runs that are the same have in common in their log."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def teacher(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt the world's texts, and what it is stored as."""
    folder = tmp_path_factory.mktemp("teacher")
    train(world, folder, "--training.steps", 60, "--checkpoint.interval", 60)
    return folder / "hf"


def distil(prompts: Path, teacher: Path, *more: object) -> list[object]:
    """The flags of a run in which the student answers the prompts in a folder."""
    return [
        *("--job.task", "distill", "--distillation.data", "prompts"),
        *("--distillation.teacher", teacher, "--distillation.divergence", "reverse_kl"),
        *("--data.dataset", prompts / "prompts.jsonl", "--chat.template", prompts / "chat.jinja"),
        *("--rollout.samples", 2, "--rollout.max_tokens", 6),
        *("--lr_scheduler.decay_type", "constant", *more),
    ]


def divergence(p: Tensor, q: Tensor, settings: dict[str, Any]) -> Tensor:
    """Of the teacher `p` and the student `q`, token by token, as GKD's paper writes it."""

    def kl(of: Tensor, beside: Tensor) -> Tensor:
        return (of * (of / beside).log()).sum(-1)

    if settings["divergence"] == "forward_kl":
        return kl(p, q)
    if settings["divergence"] == "reverse_kl":
        return kl(q, p)
    beta = settings["beta"]
    mixture = beta * p + (1 - beta) * q
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_the_formulas_on_the_students_completions(
    name: str, tmp_path: Path
) -> None:
    # What the teacher may say beyond the student's ids is left out.
    student, taught_by = student_and_teacher(vocab_size=VOCABULARY + 7)
    step = step_by_lacuna(student, taught_by, CASES[name], tmp_path)
    assert {one.ended for one in step.samples} == {True, False}, "truncated ones are trained, too"
    each = []
    for sample in step.samples:
        ids = torch.tensor([sample.prompt + sample.tokens])
        with torch.no_grad():
            logits = taught_by(ids).logits[..., :VOCABULARY]
        own = student(ids).logits
        p, q = (
            (one[0, len(sample.prompt) - 1 : -1] / CASES[name].get("temperature", 1)).softmax(-1)
            for one in (logits, own)
        )
        each.append(divergence(p, q, CASES[name]))
    wanted = torch.cat(each).mean()
    wanted.backward()
    expected = gradients_of(student)
    assert step.loss == pytest.approx(wanted.item(), rel=1e-5)
    assert (step.gradients - expected).norm() < 1e-5 * expected.norm()


def test_completions_are_kept_and_told_of(
    world: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    said = train(world, tmp_path, *distil(prompts, teacher, "--training.steps", 3))
    assert "completion" in said
    found = completions(tmp_path)
    assert [row["step"] for row in found] == [1] * 8 + [2] * 8 + [3] * 8
    assert {*found[0]} == {"step", "prompt", "completion", "tokens", "ended"}
    logged = [row for row in rows(tmp_path) if "loss" in row]
    for number, row in enumerate(logged):
        own = found[8 * number : 8 * number + 8]
        assert row["completion_tokens"] == sum(one["tokens"] for one in own) / 8
        assert row["ended"] == sum(one["ended"] for one in own) / 8
        assert row["mismatch_largest"] < 1e-4 and row["mismatch_share"] == 0
        assert not {"reward", "reward_deviation", "flat_groups"} & {*row}


def test_rewards_are_told_and_not_learnt(
    world: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    own = distil(prompts, teacher, "--training.steps", 3, "--rollout.samples", 1)
    train(world, tmp_path / "plain", *own)
    said = train(world, tmp_path / "judged", *own, "--rewards.functions", "pattern,length")
    assert "Warning" not in said
    assert weights(tmp_path / "plain") == weights(tmp_path / "judged")
    [*found] = completions(tmp_path / "judged")
    assert {*found[0]} >= {"reward", "scores"} and "advantage" not in found[0]
    [first, *_] = rows(tmp_path / "judged")
    rewards = [row["reward"] for row in found[:4]]
    assert first["reward"] == pytest.approx(sum(rewards) / 4)
    assert {"reward_pattern", "reward_length"} <= {*first} and "flat_groups" not in first


RUNS: dict[str, tuple[object, ...]] = {
    "whole": ("--distillation.divergence", "jsd", "--distillation.temperature", 1.5),
    "adapters": ("--lora.rank", 4, "--distillation.teacher_base", "int8"),
    "nf4": (
        # A teacher in nf4 would be the student: its gradients would be rounding alone.
        *("--lora.rank", 4, "--quantization.base", "nf4", "--distillation.teacher_base", "int8"),
        *("--rollout.temperature", 0.7),
    ),
}


def flags_of(case: str, prompts: Path, teacher: Path, *more: object) -> list[object]:
    """The flags of a case; a quantised base needs weights to begin with."""
    own = distil(prompts, teacher, *RUNS[case], *more)
    if case == "nf4":
        own += ["--model.name_or_path", teacher, "--model.config", "none", "--optimizer.lr", 0.03]
    return own


@pytest.mark.slow
@pytest.mark.parametrize("case", ["whole", "nf4"])
def test_a_stopped_run_goes_on_to_the_bit(
    case: str, world: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    own = flags_of(case, prompts, teacher, "--checkpoint.interval", 2)
    train(world, straight, *own, "--training.steps", 6)
    if case == "nf4":  # of runs that have ended one is enough
        train(world, resumed, *own, "--training.steps", 4)
    else:
        as_stopped(straight, resumed, 4)
    # A run that was killed later had written completions that the run that goes on makes anew.
    with open(resumed / "completions.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "prompt": "lost"}) + '\n{"step": 5, "pro')
    train(world, resumed, *own, "--training.steps", 6)
    assert curve(straight, *KEYS) == curve(resumed, *KEYS)
    assert completions(straight) == completions(resumed)
    assert weights(straight) == weights(resumed)


@pytest.mark.slow
def test_a_killed_run_ends_as_the_straight_run(
    world: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    own = distil(prompts, teacher, "--training.steps", 12, "--checkpoint.interval", 2)
    train(world, straight, *own)
    with ended(start("train", world / "run.toml", "--job.dump_folder", killed, *own)) as process:
        wait_until(lambda: bool(steps(killed)), process)
        process.kill()
    assert steps(killed)[-1] < 12
    assert "resum" in train(world, killed, *own)
    assert curve(straight, *KEYS) == curve(killed, *KEYS)
    assert completions(straight) == completions(killed)
    assert weights(straight) == weights(killed)


LAYOUTS = {
    "shards": ("--cpus", 2, "--training.batch_size", 2),
    "replicas": (
        *("--cpus", 2, "--training.batch_size", 2),
        *("--parallelism.data_parallel_replicate_degree", 2),
        *("--parallelism.data_parallel_shard_degree", 1),
    ),
    "accumulated": ("--training.batch_size", 2, "--training.gradient_accumulation_steps", 2),
    "unpacked": ("--packing.mode", "none"),
    **SHARED_LAYOUTS,
}


def check_layouts(
    case: str, layouts: list[str], world: Path, prompts: Path, teacher: Path, folder: Path
) -> None:
    """Runs a case in each layout, and compares what is logged with one process's."""
    own = flags_of(case, prompts, teacher, "--training.steps", 4)
    if case == "whole":  # where completions are in a layout no layer knows
        own += ["--model.config", write_model(folder / "model", num_hidden_layers=1)]
    train(world, folder / "alone", *own)
    wanted = curve(folder / "alone", *KEYS)
    assert len({loss for _, loss, *_ in wanted}) == 4
    for name in layouts:
        train(world, folder / name, *own, *LAYOUTS[name])
        for row, other in zip(curve(folder / name, *KEYS), wanted, strict=True):
            assert row == pytest.approx(other, rel=2e-4, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_every_layout_learns_as_one_process_does(
    case: str, world: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    layouts = ["shards", "replicas"]
    if case == "whole":  # PPO and GRPO have the others
        layouts += ["accumulated", "unpacked", "tp 2", "cp 2 × tp 2"]
    elif case == "adapters":  # packed weights do not split, so that there is no tensor parallelism
        layouts.append("cp 2, ring")
    # With nf4 the learning rate is so high that the ring's rounding grows to 2e-3 in four steps.
    check_layouts(case, layouts, world, prompts, teacher, tmp_path)


@torch.no_grad()
def apart(student: PreTrainedModel, taught_by: PreTrainedModel, tokenizer: Any) -> float:
    """KL(student, teacher) of a token in the student's own completions of held-out prompts."""
    torch.manual_seed(0)
    each = []
    for text in ("the cat ", "a dog sat ", "fish swam under ", "tree house and ", "so the bird "):
        ids = torch.tensor([tokenizer(text)["input_ids"]] * 16)
        asked = ids.shape[1]
        how = {"attention_mask": torch.ones_like(ids), "pad_token_id": 256}
        drawn = student.generate(ids, do_sample=True, max_new_tokens=12, **how)
        q, p = (
            one(drawn).logits[:, asked - 1 : -1].log_softmax(-1) for one in (student, taught_by)
        )
        each.append((q.exp() * (q - p)).sum(-1).flatten())
    return torch.cat(each).mean().item()


@pytest.mark.slow
def test_a_student_comes_near_its_teacher(world: Path, tmp_path: Path) -> None:
    train(world, tmp_path / "teacher", "--training.steps", 300, "--checkpoint.interval", 300)
    train(world, tmp_path / "student", "--training.steps", 20, "--optimizer.lr", 1e-3)
    words = ("the", "a", "cat", "dog", "bird", "fish", "sat", "ran")
    lines = [json.dumps({"prompt": f"{one} {other} "}) for one in words for other in words]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    own = distil(tmp_path, tmp_path / "teacher" / "hf", "--chat.template", "none")
    more = ("--rollout.max_tokens", 16, "--training.batch_size", 8, "--training.steps", 100)
    begins = ("--model.name_or_path", tmp_path / "student" / "hf", "--model.config", "none")
    train(world, tmp_path / "run", *own, *more, *begins, "--checkpoint.interval", 100)
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    before, after, taught_by = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "hf")
        for name in ("student", "run", "teacher")
    )
    first = apart(before, taught_by, tokenizer)
    last = apart(after, taught_by, tokenizer)
    assert last < 0.4 * first, (first, last)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"distillation": {"teacher_logprobs": "said"}}, "what the model will say is not known"),
        ({"distillation": {"alpha": 0.5}}, "teaches nothing"),
        ({"rollout": {"max_tokens": 64}}, "must fit into training.seq_len"),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "every rank generates with a whole"),
        ({"parallelism": {"expert_parallel_degree": 2}}, "every rank generates with a whole"),
        ({"training": {"enable_cpu_offload": True}}, "needs the weights on the device"),
        ({"training": {"context_len": 16}}, "completions are not cut"),
        ({"optimizer": {"early_step_in_backward": True}}, "how many micro-batches"),
        ({"float8": {"enable_float8_linear": True}}, "no shape that float8 takes"),
        ({"lora": {"rank": 2, "dropout": 0.1}}, "would find other probabilities"),
        ({"validation": {"dataset": "a.jsonl"}}, "what completions are worth"),
        ({"curriculum": {"by_success": True}}, "what completions are worth"),
        ({"data": {"streaming": True}}, "read from the cache"),
        ({"data": {"tokenization": "online"}}, "read from the cache"),
        ({"data": {"document_mask": False}}, "must not see each other"),
        ({"data": {"predict_across_documents": True}}, "do not go on in others"),
        ({"packing": {"mode": "concatenate"}}, "best_fit or none"),
        ({"packing": {"long_examples": "drop"}}, "too long are refused"),
        ({"curriculum": {"rank_every": 2}}, "no loss to be ranked by"),
        ({"curriculum": {"stages": ({"from_step": 2, "seq_len": 32},)}}, "cannot change rollouts"),
    ],
)
def test_settings_that_do_not_go_with_prompts_are_refused(settings: dict, said: str) -> None:
    def problems(**sections: Any) -> list[str]:
        training = {"seq_len": 64} | sections.pop("training", {})
        rollout = {"max_tokens": 16} | sections.pop("rollout", {})
        taught = {"data": "prompts", "teacher": "teacher"} | sections.pop("distillation", {})
        own = {"training": training, "rollout": rollout, "distillation": taught}
        config = Config(job={"task": "distill"}, **own, **sections)
        return [one for one in contradictions_of(config) if said in one]

    assert not problems()
    assert len(problems(**settings)) == 1


@pytest.mark.parametrize("setting", ["rollout.samples", "rewards.timeout_seconds"])
def test_settings_of_completions_are_refused_where_the_data_are_texts(setting: str) -> None:
    section, name = setting.split(".")
    config = Config(job={"task": "distill"}, **{section: {name: 3}})
    assert any(f"{setting}, distillation.data" in one for one in contradictions_of(config))


def test_a_run_on_conversations_does_not_go_on_with_prompts(
    world: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    (tmp_path / "talks.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 30)
    train(
        *(world, tmp_path / "run", "--job.task", "distill", "--distillation.teacher", teacher),
        *("--distillation.data", "conversations", "--data.dataset", tmp_path / "talks.jsonl"),
        *("--packing.mode", "none", "--training.steps", 2),
        *("--chat.template", prompts / "chat.jinja"),
    )
    own = distil(prompts, teacher, "--packing.mode", "none", "--training.steps", 4)
    said = train(world, tmp_path / "run", *own, status=2)
    assert "distillation.data (was None, is prompts)" in said


def test_prompts_are_shown_and_the_teacher_is_counted(
    world: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    own = distil(prompts, teacher, "--job.dump_folder", tmp_path)
    said = lacuna("data", world / "run.toml", *own)
    assert "prompt 3: " in said and "4 prompts × 2 completions" in said
    for command in (("train", "--dry-run"), ("plan", "--cpus", 1)):
        assert "teacher 0.0" in lacuna(command[0], world / "run.toml", *own, *command[1:])


def test_the_teacher_is_checked_before_training(
    world: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    own = distil(prompts, tmp_path / "nowhere")
    assert "distillation.teacher" in train(world, tmp_path / "run", *own, status=2)
    narrow = tmp_path / "narrow"
    write_model(narrow)
    random_model(AutoConfig.from_pretrained(narrow)).save_pretrained(narrow)
    wide = write_model(tmp_path / "wide", vocab_size=300)
    own = distil(prompts, narrow, "--model.config", wide)
    said = train(world, tmp_path / "run", *own, status=2)
    assert "rows for 257 tokens and the model for 300" in said
    none = [one for one in own if one not in ("--distillation.teacher", narrow)]
    assert "nobody to learn from" in train(world, tmp_path / "run", *none, status=2)


def test_the_next_command_that_is_printed_works(
    world: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    said = train(world, tmp_path / "run", *distil(prompts, teacher, "--training.steps", 1))
    [line] = [line for line in said.splitlines() if "your data" in line]
    command = line.partition("lacuna ")[2].partition(" (rows")[0]
    words = shlex.split(command.replace("my.jsonl", str(prompts / "prompts.jsonl")))
    lacuna(*words, "--chat.template", prompts / "chat.jinja", cwd=tmp_path)


def test_the_configuration_of_the_page_is_short_and_valid() -> None:
    page = (SOURCE.parent / "docs" / "distillation.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```toml\n")[1:]]
    [lines] = [block for block in blocks if 'data = "prompts"' in block]
    assert len(lines.splitlines()) <= 12
    config = Config(**tomllib.loads(lines))
    assert config.trains_on == "prompts" and math.isfinite(config.optimizer.lr)
    assert not [*contradictions_of(config)]
