"""A run by rewards, killed at random, goes on to the same end, in generating and all else."""

from pathlib import Path

import pytest
from test_kill import SOME, kill_until_done

from rewarded import KEYS, completions, flags, write_prompts
from runs import curve, train, weights


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "task"), [(1, "grpo"), (2, "ppo")])
def test_a_run_killed_at_random_ends_as_the_straight_run(
    ranks: int, task: str, world: Path, tmp_path: Path
) -> None:
    more = ("--training.steps", 40, "--checkpoint.keep_latest_k", 2, f"--{task}.updates", 2)
    own = flags(write_prompts(tmp_path), *more, "--job.task", task)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    moments = SOME if ranks > 1 else (("writing", None), ("exporting", None))
    train(world, straight, *own, "--cpus", ranks)
    kill_until_done(world, killed, ranks, "async", tuple(own), moments)
    assert curve(straight, *KEYS) == curve(killed, *KEYS)
    assert completions(straight) == completions(killed)
    assert weights(straight) == weights(killed)
