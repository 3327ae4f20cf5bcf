"""A run by rewards, killed while it generates, judges, learns or saves, goes on to the same end."""

from pathlib import Path

import pytest
from test_kill import SOME, Moment, kill_until_done, place

from rewarded import KEYS, completions, flags, write_prompts
from runs import curve, train, weights

JUDGE = """
import time
from pathlib import Path

def length(rows, completions):
    Path("judging").touch()
    time.sleep(0.02)
    Path("judging").unlink(missing_ok=True)
    return [len(one) / 10 for one in completions]
"""
# By number of ranks and task, when a run is killed, and which of its processes.
MOMENTS: dict[tuple[int, str], tuple[Moment, ...]] = {
    (1, "grpo"): (
        ("generating", None),
        ("judging", None),
        ("updating", None),
        ("writing", None),
        ("exporting", None),
    ),
    (2, "ppo"): (("generating", 1), ("judging", 0), ("updating", 1), *SOME),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "task"), MOMENTS)
def test_a_run_killed_at_any_moment_ends_as_the_straight_run(
    ranks: int, task: str, world: Path, tmp_path: Path
) -> None:
    more = ("--training.steps", 40, "--checkpoint.keep_latest_k", 2, f"--{task}.updates", 2)
    judged = ("--job.task", task, "--rewards.functions", "judge:length,pattern")
    own = flags(write_prompts(tmp_path), *more, *judged)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        (place(folder) / "judge.py").write_text(JUDGE)
    train(world, straight, *own, "--cpus", ranks, cwd=place(straight))
    kill_until_done(world, killed, ranks, "async", tuple(own), MOMENTS[ranks, task])
    assert curve(straight, *KEYS) == curve(killed, *KEYS)
    assert completions(straight) == completions(killed)
    assert weights(straight) == weights(killed)
