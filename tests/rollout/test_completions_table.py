"""A few completions are shown on a terminal, as they are and as wide as it is."""

import io
import math

import pytest
from rich.console import Console
from rich.logging import RichHandler

from lacuna.config import logger
from lacuna.rollout.completions_table import completions_table, show_completions
from lacuna.rollout.groups import Group, Sample


def group_of(texts: list[str], rewards: list[float], prompt: str = "2 + 2 =") -> Group:
    samples = [Sample([1], [2, 3], [0.0, 0.0], True, advantage=value / 2) for value in rewards]
    scores = {"exact": rewards, "my_rewards:short": [math.nan] * len(rewards)}
    return Group(prompt, texts, samples, scores, rewards)


def shown(group: Group, width: int = 100, count: int = 3, **more: object) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(completions_table(group, 7, count, console, **more))
    said = console.file.getvalue()
    assert all(len(line) <= width for line in said.split("\n"))
    return said


def test_the_best_the_worst_and_one_between_are_shown() -> None:
    words = ["five", "four", "six", "one", "none"]
    said = shown(group_of(words, [0.25, 1, 0.5, 0, math.nan]))
    assert "step 7" in said and "2 + 2 =" in said
    assert said.count("2 + 2 =") == 1
    lines = [line for line in said.split("\n") if any(one in line for one in words)]
    assert [next(one for one in words if one in line) for line in lines] == ["four", "five", "one"]
    assert "exact" in said and "reward" in said and "advantage" in said
    assert [part.strip() for part in lines[0].split("│")[2:-1]] == ["1", "-", "1", "0.5"]
    assert "advantage" not in shown(group_of(["a"], [1]), leave_out=("advantage",))
    nothing = ("scores", "reward", "advantage")
    assert "exact" not in shown(group_of(["a"], [math.nan]), leave_out=nothing)
    assert "none" in shown(group_of(["none"], [math.nan]))
    one = shown(group_of(["good", "bad"], [1, 0]), count=1)
    assert "good" in one and "bad" not in one


def test_rewards_that_differ_by_rounding_are_the_same() -> None:
    rounded = group_of(["a", "b"], [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1])
    assert rounded.rewards[0] != rounded.rewards[1]
    assert not rounded.varies
    assert not group_of(["a", "b"], [0.1 + 0.2 - 0.3, 0.0]).varies
    assert not group_of(["a", "b"], [math.nan, 1.0]).varies
    assert group_of(["a", "b"], [1.0, 1.0 + 1e-6]).varies


def test_texts_are_shown_as_they_are() -> None:
    text = "[red]a[/red]\n\tb\x1b[31m\x07 \u202ec \ud800 [link=x]d \\[e] :smile: \x9b"
    said = shown(group_of([text], [1], prompt="[bold]p[/bold]\r"), width=200)
    for part in ("[red]a[/red]\\n\\tb\\x1b[31m\\x07 ", "\\u202ec \\ud800 [link=x]d \\[e] :smile:"):
        assert part in said
    assert "[bold]p[/bold]\\r" in said and "\\x9b" in said
    assert "\x1b" not in said and "\x07" not in said


@pytest.mark.parametrize("width", [20, 60, 160])
def test_long_texts_lose_their_middle(width: int) -> None:
    said = shown(group_of(["begin" + " x" * 5000 + " theend"], [1]), width=width)
    assert len(said.split("\n")) < 40
    if width > 20:
        assert "…" in said and "begin" in said and "theend" in said


def test_only_terminals_are_shown_a_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    groups = [group_of(["flat", "flat"], [1, 1]), group_of(["good", "bad"], [1, 0])]
    monkeypatch.setattr(logger, "handlers", [])
    show_completions(groups, 1, count=2)
    assert capfd.readouterr() == ("", "")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    monkeypatch.setattr(logger, "handlers", [RichHandler(console=console)])
    show_completions(groups, 1, count=0)
    assert console.file.getvalue() == ""
    show_completions(groups, 1, count=2)
    said = console.file.getvalue()
    assert "good" in said and "bad" in said and "flat" not in said, "what varies is shown"
