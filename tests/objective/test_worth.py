"""What says what completions are worth is found before a run, or told of in words that help."""

from pathlib import Path
from typing import Any

import pytest

from lacuna.config import Config, UserError
from lacuna.objective.worth import functions_of


def test_a_scoring_model_that_is_neither_here_nor_on_the_hub_is_told_of_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm" / "scores").mkdir(parents=True)
    asked = []

    def unreachable(name: str, timeout: float) -> None:
        asked.append(name)
        raise OSError("no route")

    monkeypatch.setattr("lacuna.formats.finding.model_info", unreachable)
    said = "rewards.functions: rm/score: there is no such folder here, and no such model on the Hub"
    with pytest.raises(UserError, match=f"{said}.* no route; did you mean scores"):
        functions_of(Config(rewards={"functions": ("rm/score",)}))
    assert asked == ["rm/score"]


def test_scoring_models_on_the_hub_and_folders_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("lacuna.formats.finding.model_info", lambda name, timeout: None)

    def reward(name: str, *settings: Any) -> object:
        return opened.append(name)

    monkeypatch.setattr("lacuna.objective.worth.RewardModel", reward)
    functions_of(Config(rewards={"functions": ("org/scores", str(tmp_path))}))
    assert opened == ["org/scores", str(tmp_path)]
