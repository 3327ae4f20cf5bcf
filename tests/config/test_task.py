"""A task is one that comes with lacuna, or an objective of the user's own that has all the loop asks for."""

from pathlib import Path

import pytest

from lacuna.config import UserError, load_config

PARTS = (
    "denominator = loss = held_out_loss = annotate = report = report_held_out = None\n"
    "    state_dict = load_state_dict = check = prepare = next_step = None"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def loaded(task: str) -> str | None:
    """What is said against a task, or None; with data, so that nothing of the quickstart is in it."""
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
    assert "job.task: broken does not import (ZeroDivisionError: division by zero)" in loaded(
        "broken:Own"
    )
    assert "job.task: partial has no Owm; did you mean Own?" in loaded("partial:Owm")
    assert "job.task: partial:Own has no denominator, held_out_loss, annotate, report," in loaded(
        "partial:Own"
    )
    assert (
        "job.task: pictures:Own.trains_on is 'pictures'; set texts, conversations or preferences"
        in loaded("pictures:Own")
    )
    assert (
        "job.task: only pretrain, sft, distill, preference are available yet; did you mean pretrain?"
        in loaded("pretrian")
    )
