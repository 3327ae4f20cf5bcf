"""What is kept of a teacher's answers, and how what is done is gone on from."""

import json
from pathlib import Path

import pytest

from lacuna.config import UserError
from lacuna.data.questions import Question
from lacuna.data.template import Chat
from lacuna.objective.accepted_answers import begin, counts_of, find_verifier, finish, keep
from tiny import tokenizer_of_words

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, by its name."""
    lines = (
        "def right(row, answer): return answer == row['wanted']",
        "def fails(row, answer): return row['absent']",
        "number = 3",
    )
    (tmp_path / "judges_of_ours.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "judges_of_ours"


def question() -> Question:
    messages = [{"role": "user", "content": "w5"}]
    return Question({"wanted": "w7"}, Chat("x, row 4", tokenizer_of_words(), TEMPLATE, messages))


def test_what_a_verifier_accepts_is_kept(judges: str) -> None:
    answers = ["w7", None, "w8", "w7"]
    kept = keep(question(), answers, find_verifier(f"{judges}:right"), "")
    row = {"messages": [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w7"}]}
    assert kept == [row, row]
    assert len(keep(question(), answers, find_verifier(None), "")) == 3
    assert counts_of(answers, 2) == {"answers": 4, "kept": 2, "cut": 1, "too long": 0}
    assert counts_of([], 0)["too long"] == 1


def test_a_verifier_that_is_none_or_fails_is_refused_by_name(judges: str) -> None:
    for name, message in {
        "no_such_module:right": "no_such_module:right: no_such_module does not import",
        f"{judges}:rihgt": "has no rihgt; did you mean right",
        f"{judges}:number": "number: is no function: give one of a row and an answer",
    }.items():
        with pytest.raises(UserError, match=message):
            find_verifier(name)
    name = f"{judges}:fails"
    with pytest.raises(UserError, match=r"fails fails on x, row 4 \(KeyError: 'absent'\)"):
        keep(question(), ["w7"], find_verifier(name), name)


def test_what_is_done_is_gone_on_from_if_it_is_of_the_same(tmp_path: Path) -> None:
    progress, output = tmp_path / "out.jsonl.unfinished", tmp_path / "out.jsonl"
    assert begin(progress, "this") == 0
    counts = {"questions": 2, "answers": 4, "kept": 1, "cut": 1, "too long": 0}
    with open(progress, "a") as file:
        for number in range(2):
            file.write(json.dumps({"rows": [{"messages": [number]}], "counts": counts}) + "\n")
        file.write('{"rows": [{"mess')  # and then it was killed
    with pytest.raises(UserError, match="take the change back to go on, or remove it"):
        begin(progress, "that")
    assert begin(progress, "this") == 2
    said = finish(progress, str(output))
    assert said.startswith(f"Kept 2 of 8 answers to 4 questions in {output}. 2 did not end")
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"messages": [0]},
        {"messages": [1]},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
