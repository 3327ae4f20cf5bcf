"""Learning rates: warmup, a stable stretch, then decay."""

import math

from lacuna.config import Config


def decay_steps(total: int, warmup: int, decay_ratio: float | None) -> int:
    """How many of `total` steps decay: the share `decay_ratio`, or all after the warmup; never more than are left."""
    wanted = total - warmup if decay_ratio is None else round(total * decay_ratio)
    return max(min(wanted, total - warmup), 0)


def learning_rate(config: Config, step: int, total: int) -> float:
    """The learning rate used in `step` (from 0) of `total`, as flame and torchtitan define it.

    Times `optimizer.lr`: (s+1)/(W+1) during W warmup steps, then 1, then over D decay steps from 1 to
    `lr_scheduler.lr_min` by p = (s+1−W−stable)/(D+1): 1−p, 1−√p, or ½(1+cos πp).
    """
    peak, schedule = config.optimizer.lr, config.lr_scheduler
    if step < schedule.warmup_steps:
        return peak * (step + 1) / (schedule.warmup_steps + 1)
    decaying = decay_steps(total, schedule.warmup_steps, schedule.decay_ratio)
    progress = (step + 1 - (total - decaying)) / (decaying + 1)
    if schedule.decay_type == "constant" or progress <= 0:
        return peak
    shape = {
        "linear": 1 - progress,
        "wsd": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[schedule.decay_type]
    return peak * (schedule.lr_min + (1 - schedule.lr_min) * shape)
