"""Preference and distillation, killed, go on to the same end: what they keep aside is as it was.

That is a frozen copy of what the model began as, what it said of every answer, or a teacher.
"""

import random
from pathlib import Path

import pytest
import torch
from test_kill import SOME, assert_same_end, kill_until_done
from transformers import AutoConfig, AutoModelForCausalLM

from runs import (
    RUN,
    ended,
    start,
    steps,
    together,
    train,
    wait_until,
    write_documents,
    write_model,
    write_pairs,
)

CHAT = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
PAIRS = 'preference"\n[chat]\ntemplate = "{world}/chat.jinja"\n[preference]\nreference = '
TASKS = {
    "dpo, copy": PAIRS + '"copy"',
    "dpo, cached": PAIRS + '"cached"',
    "distillation": 'distill"\n[distillation]\nalpha = 0.7\nteacher = "{world}/teacher"',
}
LAST = 28
FLAGS = (
    *("--training.seq_len", 160, "--training.batch_size", 2, "--training.steps", LAST),
    *("--checkpoint.keep_latest_k", 2, "--validation.freq", 7),
)


def write_weights(folder: Path, seed: int, **settings: object) -> None:
    """A tiny model with random weights and a tokenizer."""
    model_config = AutoConfig.from_pretrained(write_model(folder, **settings))
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(model_config).save_pretrained(folder)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(task, marks=[] if task == "dpo, cached" else pytest.mark.slow)
        for task in TASKS
    ],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with dropout, data and run.toml of a task."""
    task = request.param
    folder = tmp_path_factory.mktemp("world")
    write_weights(folder / "model", seed=1, attention_dropout=0.1)
    (folder / "chat.jinja").write_text(CHAT)
    generator = random.Random(0)
    write = write_pairs
    if task == "distillation":
        write_weights(folder / "teacher", seed=2, hidden_size=96)
        write = write_documents
    write(folder / "train.jsonl", generator, 200)
    write(folder / "validation.jsonl", generator, 20)
    text = RUN.replace("config =", "name_or_path =") + '[job]\ntask = "' + TASKS[task]
    text += '\n[validation]\ndataset = "{world}/validation.jsonl"\ndataset_split = "train"\n'
    (folder / "run.toml").write_text(text.format(world=folder))
    return folder


@pytest.mark.slow
def test_a_task_killed_once_ends_as_the_straight_run(world: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    killed = tmp_path / "killed"
    flags = (*FLAGS, "--checkpoint.interval", 3)

    def kill_and_go_on() -> None:
        words = ("train", world / "run.toml", "--job.dump_folder", killed)
        with ended(start(*words, *flags)) as process:
            wait_until(lambda: bool(steps(killed)), process)
            process.kill()
        assert steps(killed)[-1] < LAST
        assert "resum" in train(world, killed, *flags)

    together(lambda: train(world, straight, *flags), kill_and_go_on)
    assert_same_end(killed, straight)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_task_killed_at_random_ends_as_the_straight_run(world: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--data.num_workers", 1)
    straight = tmp_path / "straight"
    killed = tmp_path / "killed"
    together(
        lambda: train(world, straight, *flags, "--cpus", 2),
        lambda: kill_until_done(world, killed, 2, "async", flags, SOME),
    )
    assert_same_end(killed, straight)
