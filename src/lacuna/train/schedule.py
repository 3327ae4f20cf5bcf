"""Learning rates: warmup, a stable stretch, then decay."""

import math

from lacuna.config import Config


def decay_steps(total: int, warmup: int, decay_ratio: float | None) -> int:
    """How many of `total` steps decay: the share `decay_ratio`, or all after the warmup; never more than are left."""
    wanted = total - warmup if decay_ratio is None else round(total * decay_ratio)
    return max(min(wanted, total - warmup), 0)


def learning_rate_factor(
    step: int, total: int, warmup: int, decay_ratio: float | None, decay_type: str, minimum: float
) -> float:
    """What the learning rate is multiplied with in `step` (from 0), as flame and torchtitan define it.

    (s+1)/(W+1) during W warmup steps, then 1, then over D decay steps from 1 to `minimum` (a ratio) by
    p = (s+1−W−stable)/(D+1): 1−p, 1−√p, or ½(1+cos πp).
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    decaying = decay_steps(total, warmup, decay_ratio)
    progress = (step + 1 - (total - decaying)) / (decaying + 1)
    if decay_type == "constant" or progress <= 0:
        return 1.0
    shape = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[decay_type]
    return minimum + (1 - minimum) * shape


def learning_rate(config: Config, step: int, total: int) -> float:
    """The learning rate used in `step` (from 0) of `total`."""
    schedule = config.lr_scheduler
    factor = learning_rate_factor(
        step, total, schedule.warmup_steps, schedule.decay_ratio, schedule.decay_type, schedule.lr_min
    )
    return config.optimizer.lr * factor
