"""Models that a run reads again when it goes on must be those that it began with."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lacuna.config import UserError
from lacuna.train.resume import require_same_inputs
from runs import RUN, train, write_documents, write_model, write_pairs

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
    assert f"the weights of {setting} ({frozen})" in output
    assert "put the old content back" in output


def test_what_a_checkpoint_did_not_note_of_frozen_models_is_no_change() -> None:
    files = {"the files of data": "1"}
    noted = {"the weights of distillation.teacher (folder)": "2"}
    require_same_inputs(files, files | noted, "run")
    require_same_inputs(files | noted, files, "run")  # the settings name another by now
    with pytest.raises(UserError, match="the files of data"):
        require_same_inputs({}, files, "run")
    with pytest.raises(UserError, match="the weights in model.name_or_path"):
        require_same_inputs({}, {"the weights in model.name_or_path": "2"}, "run")
