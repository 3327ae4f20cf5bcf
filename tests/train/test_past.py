"""A run goes on from what it was started with: another past is refused, other settings are said."""

import json
import shutil
from pathlib import Path

import pytest

from lacuna.config import UserError
from lacuna.train.resume import require_same_inputs
from runs import make_world, rows, train

pytestmark = pytest.mark.slow  # whole runs of the command line


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world, and in it a run of four steps."""
    world = make_world(tmp_path_factory.mktemp("begun"))
    train(world, world / "run", "--training.steps", 4, timeout=400)
    return world


def again(begun: Path, tmp_path: Path, *flags: object, status: int = 0) -> str:
    """What the run says that goes on to step 6, in a copy of its folder."""
    shutil.copytree(begun / "run", tmp_path / "run")
    return train(begun, tmp_path / "run", "--training.steps", 6, *flags, status=status, timeout=400)


def one_word(path: Path) -> str:
    text = path.read_text()
    return text.replace("cat", "dog", 1)


def backwards(path: Path) -> str:
    return "".join(reversed(path.read_text().splitlines(keepends=True)))


def other_tokens(path: Path) -> str:
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return json.dumps(content)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("train.jsonl", one_word, "the files of"),
        ("train.jsonl", backwards, "the files of"),
        ("model/tokenizer.json", other_tokens, "the tokenizer"),
    ],
)
def test_changed_data_or_tokenizer_is_refused(
    begun: Path, tmp_path: Path, file: str, change: object, said: str
) -> None:
    path = begun / file
    content = path.read_text()
    path.write_text(change(path))
    try:
        output = again(begun, tmp_path, status=2)
    finally:
        path.write_text(content)
    assert (
        f"not what it was when the run was started: {said}" in output
        and "initial_load_path" in output
    )
    assert max(row["step"] for row in rows(tmp_path / "run")) == 4


def test_contents_that_only_one_of_two_runs_needs_are_said_to_be_so() -> None:
    saved = {"the tokenizer": "a", "the weights in model.name_or_path": "b"}

    def way() -> str:
        return "with another"

    told = r"the weights in model.name_or_path \(not needed by these settings\)"
    with pytest.raises(UserError, match=told):
        require_same_inputs(saved, {"the tokenizer": "a"}, way)
    with pytest.raises(UserError, match=r"\(needed by these alone\)"):
        require_same_inputs({"the tokenizer": "a"}, saved, way)
    require_same_inputs(saved, saved | {"the special tokens": "c"}, way)
    with pytest.raises(UserError, match="run was started: the special tokens"):
        require_same_inputs({"the special tokens": "c"}, {"the special tokens": "d"}, way)


def test_changed_settings_and_another_model_configuration_are_said_before_the_first_step(
    begun: Path, tmp_path: Path
) -> None:
    path = begun / "model" / "config.json"
    content = path.read_text()
    settings = json.loads(content)
    settings["attention_dropout"] = 0.125
    path.write_text(json.dumps(settings))
    try:
        output = again(begun, tmp_path, "--metrics.log_freq", 2, "--optimizer.weight_decay", 0)
    finally:
        path.write_text(content)
    said, _, steps = output.partition("step      6")
    assert "attention_dropout of the model's configuration: 0.0 → 0.125 (" in said and steps
    assert (
        "training.steps: 4 → 6 (the learning rate goes on where the new schedule has it: " in said
    )
    assert "metrics.log_freq: 1 → 2\n" in "\n".join(line.rstrip() for line in said.splitlines())
    assert (
        "optimizer.weight_decay: " in said and "(the moments of the steps so far are kept)" in said
    )
    assert "job.task" not in said and "data.dataset:" not in said


def test_a_resume_with_nothing_changed_says_nothing_of_changes(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun / "run", tmp_path / "other")
    (tmp_path / "other" / "finished.json").unlink()
    shutil.rmtree(begun / "run")
    shutil.copytree(tmp_path / "other", begun / "run")
    assert "was → is" not in train(begun, begun / "run", "--training.steps", 4, timeout=400)
