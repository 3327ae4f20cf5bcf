"""What the loop counts: over the whole run, and from one log to the next."""

import time
from dataclasses import dataclass, field

from lacuna import BEGAN


@dataclass
class TrainState:
    """Counters of a run, which its checkpoints keep.

    Attributes:
        source_tokens: how many tokens of each source all ranks have seen.
        step: how many steps are done.
        tokens: how many tokens all ranks have seen.
        worse_validations: how many validations there were since the one with the best loss.
        validated: the step after which the last validation was made.
        curriculum_stage: how many stages of the curriculum have begun.
        ranked: the step at which documents were last ranked by their loss.
    """

    source_tokens: list[int]
    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    best_loss: float = float("inf")
    best_step: int | None = None
    worse_validations: int = 0
    validated: int = -1
    curriculum_stage: int = 0
    ranked: int | None = None


@dataclass
class Start:
    """What the time from the start of this process to the end of its first step went into.

    Attributes:
        phases: the seconds that each took, in their order.
        ended: when the last of them ended.
    """

    phases: dict[str, float] = field(default_factory=dict)
    ended: float = BEGAN

    def end_phase(self, name: str) -> None:
        """Ends the phase that began where the last one ended."""
        now = time.monotonic()
        self.phases[name] = now - self.ended
        self.ended = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases.items())
        return f"{sum(self.phases.values()):.1f} s after the start ({parts})"


@dataclass
class Interval:
    """What is measured from one log to the next.

    Time that is not spent on training is added to `started`, so that it does not count.
    """

    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0
