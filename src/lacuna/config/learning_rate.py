"""The learning rate in each step of a run, computed from its settings."""

import math

from lacuna.config.optimizers import LRSchedulerConfig


def warmup_steps(schedule: LRSchedulerConfig, total: int) -> int:
    """Steps of warmup in a run of `total`: as given, else a tenth of them, at most flame's 200."""
    given = schedule.warmup_steps
    return min(total // 10, 200) if given is None else given


def peak_step(schedule: LRSchedulerConfig, total: int) -> int:
    """The step (from 0) with the highest learning rate: the last of the warmup or the next one."""
    warmup = warmup_steps(schedule, total)
    around = (min(max(step, 0), total - 1) for step in (warmup - 1, warmup))
    return max(around, key=lambda step: learning_rate(1.0, schedule, step, total))


def learning_rate(peak: float, schedule: LRSchedulerConfig, step: int, total: int) -> float:
    """The learning rate used in `step` (from 0) of `total`, as flame and torchtitan define it.

    It is `peak` times a factor: (s+1)/(W+1) during W warmup steps, then 1, then from 1 to `lr_min`
    over D decay steps, along 1−p, 1−√p, or ½(1+cos πp) where p = (s+1−W−stable)/(D+1). D is the
    share `decay_ratio` of all steps, or all steps after the warmup, and never more than those.
    """
    warmup = warmup_steps(schedule, total)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    left = total - warmup
    decaying = left
    if schedule.decay_ratio is not None:
        decaying = min(left, round(total * schedule.decay_ratio))
    decaying = max(decaying, 0)
    progress = (step + 1 - (total - decaying)) / (decaying + 1)
    if schedule.decay_type == "constant" or progress <= 0:
        return peak
    curves = {"sqrt": 1 - math.sqrt(progress), "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    share = curves.get(schedule.decay_type, 1 - progress)
    return peak * (schedule.lr_min + (1 - schedule.lr_min) * share)
