"""`lacuna teach` writes what a teacher says once; runs learn from that what they would from it."""

import json
from pathlib import Path

import numpy as np
import pytest

from lacuna.data.teacher import IDS, LOGPROBS
from runs import curve, lacuna, refused, steps, stop_after, train, weights

DISTILL = ("--job.task", "distill", "--distillation.teacher")
STORED = "--distillation.teacher_logprobs"
# With these a teacher in memory sees no more and no less of a document than lacuna teach shows it.
ALIKE = ("--packing.mode", "best_fit", "--packing.long_examples", "split")


@pytest.fixture(scope="module")
def teacher(straight: Path) -> Path:
    return straight / "hf"


@pytest.fixture(scope="module")
def said(world: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the teacher says of all tokens."""
    folder = tmp_path_factory.mktemp("said") / "all"
    output = lacuna("teach", world / "run.toml", *DISTILL, teacher, STORED, folder, "--top-k", 1000)
    assert f"Wrote {folder}: 256 tokens at each of" in output
    return folder


@pytest.mark.slow
def test_a_run_learns_what_it_would_from_the_teacher(
    world: Path, teacher: Path, said: Path, tmp_path: Path
) -> None:
    flags = (*DISTILL, teacher, *ALIKE, "--distillation.alpha", 0.7)
    train(world, tmp_path / "live", *flags)
    output = train(world, tmp_path / "stored", *flags, STORED, said)
    assert f"learning from the 256 likeliest tokens of {teacher}" in output
    live, stored = (
        curve(tmp_path / name, "loss", "divergence", "cross_entropy", "grad_norm")
        for name in ("live", "stored")
    )
    assert len({loss for _, loss, *_ in live}) == 8
    for one, other in zip(live, stored, strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_two_processes_write_and_learn_the_same_as_one(
    world: Path, teacher: Path, said: Path, tmp_path: Path
) -> None:
    both = tmp_path / "both"
    words = (*DISTILL, teacher, STORED, both, "--top-k", 256, "--cpus", 2)
    lacuna("teach", world / "run.toml", *words, "--parallelism.tensor_parallel_degree", 2)
    ids, logprobs = np.load(said / IDS), np.load(said / LOGPROBS)
    assert np.allclose(np.load(both / LOGPROBS), logprobs, atol=1e-5)
    assert (np.load(both / IDS) == ids).mean() > 0.99
    flags = ("--job.task", "distill", "--training.global_batch_size", 4, "--training.batch_size", 2)
    train(world, tmp_path / "one", *flags, STORED, said)
    train(world, tmp_path / "two", *flags, STORED, both, "--cpus", 2)
    for one, two in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_not_from_something_else(
    world: Path, teacher: Path, said: Path, tmp_path: Path
) -> None:
    flags = ("--job.task", "distill", "--checkpoint.interval", 2, STORED)
    train(world, tmp_path / "straight", *flags, said)
    stop_after(3, world, tmp_path / "stopped", *flags, said)
    assert steps(tmp_path / "stopped")[-1] < 8
    few = tmp_path / "few"
    lacuna("teach", world / "run.toml", *DISTILL, teacher, STORED, few, "--top-k", 5)
    message = train(world, tmp_path / "stopped", *flags, few, status=2)
    assert "it is not what the run learnt from so far" in message
    train(world, tmp_path / "stopped", *flags, said)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")


def test_what_cannot_be_is_refused_before_anything_is_done(
    world: Path, teacher: Path, said: Path, tmp_path: Path
) -> None:
    run = world / "run.toml"
    assert "RUN.toml is no distillation" in refused("teach", run)
    assert "set distillation.teacher_logprobs" in refused("teach", run, *DISTILL, teacher)
    taken = refused("teach", run, *DISTILL, teacher, STORED, said)
    assert f"{said} exists already" in taken
    below = ("teach", run, *DISTILL, teacher, STORED, tmp_path / "x", "--top-k", 0)
    assert "--top-k must be at least 1" in refused(*below)
    flags = ("--job.task", "distill", STORED, said, "--job.dump_folder", tmp_path / "run")
    for setting in (
        ("--distillation.temperature", 2),
        ("--data.predict_across_documents",),
        ("--data.streaming", "--training.epochs", "none"),
        ("--data.tokenization", "online"),
    ):
        told = refused("train", run, *flags, *setting)
        name = str(setting[0]).removeprefix("--")
        assert name in told and "distillation.teacher_logprobs" in told, told


def test_what_another_model_said_is_refused(world: Path, said: Path, tmp_path: Path) -> None:
    train(world, tmp_path / "other", "--training.steps", 1, "--training.seed", 5)
    flags = (*DISTILL, tmp_path / "other" / "hf", STORED, said)
    for dry in ((), ("--dry-run",)):
        message = train(world, tmp_path / "run", *flags, *dry, status=2)
        assert "another model: drop one of the two, or write the first anew" in message
    teacher = json.loads((said / "teacher.json").read_text())["teacher"]
    packed = (*DISTILL, teacher, STORED, said, "--distillation.teacher_base", "int8")
    message = train(world, tmp_path / "run", *packed, status=2)
    assert "distillation.teacher_base: " in message and "said with none" in message


JUDGE = """
import os
def even(row, answer):
    if row["n"] == 9 and os.path.exists("broken"):
        raise RuntimeError("not now")
    return len(answer) % 2 == 0
"""


def test_answers_that_are_kept_are_conversations_to_train_on(world: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "n": n} for n in range(16)]
    answered = [{"role": "assistant", "content": "Yes."}]
    rows = [row | {"messages": row["messages"] + answered} for row in rows]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(JUDGE)
    sft = ("--job.task", "sft", "--training.seq_len", 128, "--training.steps", 1, "--data.dataset")
    chat = ("--chat.template", "chatml", "--model.new_tokens", "<|im_start|>,<|im_end|>")
    train(world, tmp_path / "first", *sft, data, *chat)
    teacher = tmp_path / "first" / "hf"
    words = ("teach", world / "run.toml", *DISTILL, teacher, "--data.dataset", data)
    words += ("--verifier", "judge:even", "--samples", 4, "--temperature", 1.5)
    words += ("--max-tokens", 60, "--answers")
    straight = lacuna(*words, "straight.jsonl", cwd=tmp_path)
    assert "answers to 16 questions in straight.jsonl." in straight
    kept = [json.loads(line) for line in (tmp_path / "straight.jsonl").read_text().splitlines()]
    assert 2 < len(kept) < 60
    for row in kept:
        question, answer = row["messages"]
        assert question in [one["messages"][0] for one in rows]
        assert answer["role"] == "assistant" and len(answer["content"]) % 2 == 0
    (tmp_path / "broken").touch()
    message = lacuna(*words, "stopped.jsonl", cwd=tmp_path, status=2)
    assert "--verifier judge:even fails on" in message and "row 10 (RuntimeError" in message
    assert not (tmp_path / "stopped.jsonl").exists()
    (tmp_path / "broken").unlink()
    assert "going on after 2 batches" in lacuna(*words, "stopped.jsonl", cwd=tmp_path)
    assert (tmp_path / "stopped.jsonl").read_text() == (tmp_path / "straight.jsonl").read_text()
    output = lacuna(*words, "stopped.jsonl", cwd=tmp_path, status=2)
    assert "stopped.jsonl exists already" in output
    own = ("--model.config", "none", "--model.name_or_path", teacher)
    train(world, tmp_path / "second", *sft, tmp_path / "straight.jsonl", *own)


def test_options_that_do_not_go_together_are_refused(world: Path, tmp_path: Path) -> None:
    run = ("teach", world / "run.toml", *DISTILL, "x")
    answers = (*run, "--answers", tmp_path / "out.jsonl")
    for words, message in {
        (*run, STORED, "y", "--samples", 2): "--samples is for --answers FILE",
        (*answers, "--top-k", 3): "--top-k is for log-probabilities",
        (*answers, "--samples", 2): "greedy answers are all alike",
        (*answers, "--max-tokens", 0): "--max-tokens must be at least 1",
        (*answers, "--temperature", -1): "--temperature must be 0 or from 0.01 to 100",
        (*answers, "--data.streaming"): "leave out data.streaming",
        (*answers, "--cpus", 2): "--answers works in one process",
    }.items():
        assert message in refused(*words)
