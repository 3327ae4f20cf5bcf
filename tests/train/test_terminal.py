"""What the terminal shows of a row of metrics."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lacuna.config.machine import MetricsConfig
from lacuna.train.metrics import MetricWriter


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"loss": 0.0, "reward": 0.0, "skipped_steps": 0}, "loss 0.0000  reward 0.000"),
        ({"val_reward": 0.0, "val_pass_at_1": 0.0}, "0.000  0.0% of held-out prompts solved"),
        ({"reward": None, "skipped_steps": 2}, "step      3  skipped 2"),
        ({"loss": 0.5, "score_margin": 1.0, "score_accuracy": 0.75}, "1.000  75.0% of pairs right"),
        ({"val_score_accuracy": 0.0}, "0.0% of pairs right"),
    ],
)
def test_rewards_of_0_are_shown_and_what_tells_nothing_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], shown: str
) -> None:
    console = Console(width=200, no_color=True)
    settings = MetricsConfig(enable_tensorboard=False)
    with MetricWriter(settings, "run", str(tmp_path), False, False, 0, console, 0, 5, {}) as writer:
        writer.write({"step": 3, **row})
    said = capsys.readouterr().out.strip()
    assert said.endswith(shown) and said.startswith("step      3")
