"""Models that a run reads again when it goes on must be those that it began with."""

import random
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lacuna.config import UserError
from lacuna.train.resume import require_same_inputs
from runs import RUN, lacuna, train, write_documents, write_model, write_pairs

CHAT = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
TASKS = {
    "preference": 'preference"\n[chat]\ntemplate = "{world}/chat.jinja"\n[preference]\n'
    'reference = "copy"',
    "distill": 'distill"\n[distillation]\nteacher = "{world}/frozen"',
}


def write_task(world: Path, task: str) -> Path:
    """Fills a folder with a run of a task; returns the folder of the model that it reads again."""
    names = {"preference": ["model"], "distill": ["model", "frozen"]}[task]
    for seed, name in enumerate(names):
        model_config = AutoConfig.from_pretrained(write_model(world / name))
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(model_config).save_pretrained(world / name)
    (world / "chat.jinja").write_text(CHAT)
    write = write_pairs if task == "preference" else write_documents
    write(world / "train.jsonl", random.Random(0), 100)
    text = RUN.replace("config =", "name_or_path =") + '[job]\ntask = "' + TASKS[task]
    (world / "run.toml").write_text(text.format(world=world))
    return world / names[-1]


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ("preference", "preference.reference"),
        pytest.param("distill", "distillation.teacher", marks=pytest.mark.slow),
    ],
)
def test_a_frozen_model_that_changed_is_refused_when_a_run_goes_on(
    task: str, setting: str, tmp_path: Path
) -> None:
    frozen = write_task(tmp_path, task)
    flags = ("--training.seq_len", 160, "--training.batch_size", 2, "--checkpoint.interval", 2)
    run = tmp_path / "run"
    train(tmp_path, run, *flags, "--training.steps", 2)
    train(tmp_path, run, *flags, "--training.steps", 3)
    file = frozen / "model.safetensors"
    other = {key: value + 0.01 for key, value in load_file(file).items()}
    save_file(other, file, metadata={"format": "pt"})
    output = train(tmp_path, run, *flags, "--training.steps", 4, status=2)
    named = "model.name_or_path" if task == "preference" else frozen
    assert f"the weights of {setting} ({named})" in output
    assert "put back the old content" in output


def test_another_model_is_refused_where_it_would_be_the_reference(tmp_path: Path) -> None:
    write_task(tmp_path, "distill")
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "the cat"}\n' * 8)
    text = RUN.replace("config =", "name_or_path =").format(world=tmp_path)
    (tmp_path / "run.toml").write_text(text)
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    own = ("--job.task", "grpo", "--grpo.beta", 0.1, "--rewards.functions", "length")
    own += ("--data.dataset", data, "--training.batch_size", 2, "--rollout.samples", 2)
    own += ("--rollout.max_tokens", 4, "--model.tokenizer_path", tmp_path / "model")
    for steps, name in ((1, "model"), (2, "moved")):
        model = ("--model.name_or_path", tmp_path / name, "--training.steps", steps)
        train(tmp_path, tmp_path / "run", *own, *model)
    other = ("--model.name_or_path", tmp_path / "frozen", "--training.steps", 3)
    said = train(tmp_path, tmp_path / "run", *own, *other, status=2)
    assert "the weights of grpo.reference (model.name_or_path)" in said
    assert "put back the old content, or the setting that named it" in said
    train(tmp_path, tmp_path / "run", *own, *other, "--grpo.beta", 0)


@pytest.mark.parametrize(
    "words",
    [
        ("--job.task", "grpo", "--grpo.beta", 0.1),
        ("--job.task", "grpo"),
        ("--job.task", "ppo", "--ppo.beta", 0),
    ],
)
def test_the_new_run_that_is_advised_where_content_changed_can_be_started(
    words: tuple[object, ...], tmp_path: Path
) -> None:
    write_task(tmp_path, "distill")
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "the cat"}\n' * 8)
    text = RUN.replace("config =", "name_or_path =").format(world=tmp_path)
    (tmp_path / "run.toml").write_text(text)
    own = (*words, "--data.dataset", data, "--training.batch_size", 2, "--rollout.samples", 2)
    own += ("--rollout.max_tokens", 4, "--rewards.functions", "length", "--training.steps")
    train(tmp_path, tmp_path / "run", *own, 1)
    data.write_text('{"prompt": "the dog"}\n' * 8)
    said = train(tmp_path, tmp_path / "run", *own, 2, status=2)
    assert "not what it was when the run was started: the files of" in said
    found = re.search(r"with (checkpoint.initial_load_path) = '(.+)'\.", said)
    if "--grpo.beta" in words or "ppo" in words:
        convert, *flags = re.search(r"`lacuna (.*)` makes of it \((.*) (.*)\)", said).groups()
        lacuna(*shlex.split(convert), cwd=tmp_path)
    else:
        flags = [f"--{found[1]}", found[2]]
    said = train(tmp_path, tmp_path / "other", *own, 1, *flags, cwd=tmp_path)
    assert "Done: 1 steps" in said


def test_what_a_checkpoint_did_not_note_of_frozen_models_is_no_change() -> None:
    files = {"the files of data": "1"}
    noted = {"the weights of distillation.teacher (folder)": "2"}
    require_same_inputs(files, files | noted, str)
    require_same_inputs(files | noted, files, str)  # the settings name another by now
    with pytest.raises(UserError, match="the files of data"):
        require_same_inputs({}, files, str)
    with pytest.raises(UserError, match="the weights in model.name_or_path"):
        require_same_inputs({}, {"the weights in model.name_or_path": "2"}, str)
