"""What the loop counts: over the whole run, and from one log to the next."""

import time
from dataclasses import dataclass, field


@dataclass
class TrainState:
    """Counters of a run, which its checkpoints keep.

    `step` is the number of steps done, `tokens` (`source_tokens`) those seen by all ranks,
    `ranked` the step at which documents were last ranked by their loss.
    """

    source_tokens: list[int]
    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    best_loss: float = float("inf")
    best_step: int | None = None
    worse_validations: int = 0
    curriculum_stage: int = 0
    ranked: int | None = None


@dataclass
class Interval:
    """What is measured between two logs; `started` is put off by time that is not training."""

    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0
