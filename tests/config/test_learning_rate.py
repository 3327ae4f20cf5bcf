"""Learning rates as by hand."""

import math

import pytest

from lacuna.config.learning_rate import learning_rate, peak_step, warmup_steps
from lacuna.config.optimizers import LRSchedulerConfig

ROOT = math.sqrt(0.5)
RATES = {
    # 2 steps of warmup to a third and two thirds, then 8 of decay: 1 - p with p = 1/9 ... 8/9
    "linear": (
        {"warmup_steps": 2},
        [1 / 3, 2 / 3, 8 / 9, 7 / 9, 6 / 9, 5 / 9, 4 / 9, 3 / 9, 2 / 9, 1 / 9],
    ),
    "linear with a floor": (
        {"warmup_steps": 2, "lr_min": 0.1},
        [1 / 3, 2 / 3, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2],
    ),
    # 2 steps of warmup, 5 at the top, 3 of decay: p = 1/4, 2/4, 3/4
    "wsd": (
        {"warmup_steps": 2, "decay_ratio": 0.3, "decay_type": "wsd"},
        [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25],
    ),
    "wsd without a ratio": ({"warmup_steps": 0, "decay_type": "wsd"}, [1.0] * 9 + [0.5]),
    "cosine": (
        {"warmup_steps": 2, "decay_ratio": 0.3, "decay_type": "cosine"},
        [1 / 3, 2 / 3, 1, 1, 1, 1, 1, (1 + ROOT) / 2, 0.5, (1 - ROOT) / 2],
    ),
    "sqrt": (
        {"warmup_steps": 2, "decay_ratio": 0.3, "decay_type": "sqrt"},
        [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.5, 1 - ROOT, 1 - math.sqrt(0.75)],
    ),
    "sqrt with a floor": (
        {"warmup_steps": 0, "decay_ratio": 0.1, "decay_type": "sqrt", "lr_min": 0.5},
        [1.0] * 9 + [0.5 + 0.5 * (1 - ROOT)],
    ),
    "constant": ({"warmup_steps": 3, "decay_type": "constant"}, [0.25, 0.5, 0.75] + [1.0] * 7),
    "no decay": ({"warmup_steps": 0, "decay_ratio": 0.0}, [1.0] * 10),
    "no warmup": ({"warmup_steps": 0, "decay_ratio": 0.2}, [1.0] * 8 + [2 / 3, 1 / 3]),
    # half of the steps should decay, but only 2 are left after the warmup: p = 1/3, 2/3
    "clamped": (
        {"warmup_steps": 8, "decay_ratio": 0.5},
        [n / 9 for n in range(1, 9)] + [2 / 3, 1 / 3],
    ),
    "warmup longer than the run": ({"warmup_steps": 19}, [n / 20 for n in range(1, 11)]),
}


@pytest.mark.parametrize(("settings", "expected"), RATES.values(), ids=RATES.keys())
def test_the_learning_rate_of_every_step(settings: dict, expected: list[float]) -> None:
    schedule = LRSchedulerConfig(**settings)
    rates = [learning_rate(0.02, schedule, step, total=10) for step in range(10)]
    assert rates == pytest.approx([0.02 * factor for factor in expected], rel=1e-12)


@pytest.mark.parametrize(
    ("total", "warmup"), [(1, 0), (9, 0), (60, 6), (1_999, 199), (2_000, 200), (10**6, 200)]
)
def test_a_warmup_that_nobody_gave_is_a_tenth_of_the_run_and_at_most_200_steps(
    total: int, warmup: int
) -> None:
    schedule = LRSchedulerConfig(decay_type="constant")
    assert warmup_steps(schedule, total) == warmup
    assert peak_step(schedule, total) == min(warmup, total - 1)
    assert learning_rate(0.02, schedule, peak_step(schedule, total), total) == 0.02
    assert warmup_steps(LRSchedulerConfig(warmup_steps=7), total) == 7


@pytest.mark.parametrize("name", RATES)
def test_the_peak_is_the_highest_rate_of_the_run(name: str) -> None:
    settings, factors = RATES[name]
    assert factors[peak_step(LRSchedulerConfig(**settings), 10)] == max(factors)
