"""A task comes with lacuna, or is an objective of the user's with all that the loop asks for."""

from pathlib import Path

import pytest

from lacuna.config import UserError, load_config

PARTS = (
    "denominator = loss = held_out_loss = annotate = report = report_held_out = None\n"
    "    state_dict = load_state_dict = check = frozen_models = prepare = next_step = None"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def loaded(task: str) -> str | None:
    """What is said against a task, or None. Data are given, so that it is not the quickstart."""
    words = [
        "--job.task",
        task,
        "--model.config",
        "gpt2_124m.json",
        "--data.dataset",
        "somebody/texts",
    ]
    try:
        load_config(None, words)
    except UserError as error:
        return str(error)
    return None


def write(folder: Path, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text(f"class Own:\n    {body}\n    {PARTS}\n")


@pytest.mark.parametrize("task", ["sft", "pretrain", "own_texts:Own", "own_conversations:Own"])
def test_a_task_that_can_be_had_is_taken(task: str, folder: Path) -> None:
    write(folder, "own_texts", 'trains_on = "texts"')
    write(folder, "own_conversations", 'trains_on = "conversations"')
    assert loaded(task) is None
    config = load_config(
        None,
        [
            "--job.task",
            task,
            "--model.config",
            "gpt2_124m.json",
            "--data.dataset",
            "somebody/texts",
        ],
    )
    assert (config.conversations is not None) == (task in ("sft", "own_conversations:Own"))


def test_an_objective_that_cannot_be_had_is_refused_by_name(folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "partial.py").write_text("class Own:\n    trains_on = 'texts'\n    loss = None\n")
    write(folder, "pictures", 'trains_on = "pictures"')
    assert "job.task: absent does not import (ModuleNotFoundError" in loaded("absent:Own")
    (folder / "lacking.py").write_text("import absent\n")
    assert "install absent, or start the run in the folder where it lies" in loaded("lacking:Own")
    assert "job.task: broken does not import (ZeroDivisionError: division by zero)" in loaded(
        "broken:Own"
    )
    assert "job.task: partial has no Owm; did you mean Own?" in loaded("partial:Owm")
    assert "job.task: partial:Own has no denominator, held_out_loss, annotate, report," in loaded(
        "partial:Own"
    )
    said = "trains_on is 'pictures'; set texts, conversations, preferences or prompts"
    assert f"job.task: pictures:Own.{said}" in loaded("pictures:Own")
    (folder / "script.py").write_text("raise SystemExit(2)\n")
    assert "job.task: script does not import (SystemExit: 2)" in loaded("script:Own")
    write(folder, "eager", "trains_on = 'texts'")
    with (folder / "eager.py").open("a") as file:
        file.write("made = Own()\n")
        file.write("class Asking(Own):\n    def __init__(self, beta): pass\n")
    assert "job.task: eager:made cannot be called without arguments" in loaded("eager:made")
    assert "job.task: eager:Asking cannot be called without arguments" in loaded("eager:Asking")
    assert (
        "job.task: there is no such task, but pretrain, sft, distill, preference, grpo, reward, "
        "ppo; did you mean pretrain?" in loaded("pretrian")
    )
