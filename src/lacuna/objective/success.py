"""Prompts by success: those that the model solves now and then come more often than the others."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config import OutageError, UserError
from lacuna.config.documents import CurriculumConfig
from lacuna.data import Loader
from lacuna.data.mixture import random_key
from lacuna.data.prompts import Prompt, prompt_of
from lacuna.model.build import BuiltModel
from lacuna.objective.held_out import times_solved
from lacuna.rollout.groups import Group

# Tells the randomness of which prompts come from all other that derives from the seed.
_STREAM = 4
# What an estimate begins with: this much of a completion that solved the prompt, and of one that
# did not. So it is never 0 or 1, and a prompt of which little is known may still come.
_PRIOR = 0.125
# From this share on a prompt counts as solved always, and up to 1 less it as never.
_ALWAYS = 0.95


class Successes:
    """How often the model solved each prompt of late, and which prompts come next by that.

    The estimate p of a prompt is the share of its completions that solved it, those of its latest
    draw with the weight 1, those of the draw before with `curriculum.success_decay`, and so on; to
    both kinds of completions an eighth is added. A step draws its prompts without replacement, each
    with the weight p (1 - p), which is largest where half of the completions solve it; p is 1/2
    where a prompt was not drawn yet. That weight is the learnability of arXiv 2408.15099, which
    arXiv 2502.12272 takes for language models. All ranks draw the same.

    Attributes:
        counts: of each prompt, the completions that solved it and all, each with its weight,
            float32 [2, documents]; empty before the first draw.
        draws: how often prompts were drawn.
        usable: whether a document is a prompt, bool [documents].
        drawn: the numbers of the prompts that were drawn last.
    """

    usable: np.ndarray
    drawn: np.ndarray

    def __init__(self, settings: CurriculumConfig, solved_at: float, seed: int) -> None:
        self.settings = settings
        self.solved_at = solved_at
        self.seed = seed
        self.counts = np.zeros((2, 0), dtype=np.float32)
        self.draws = 0

    def next_prompts(self, _: BuiltModel, source: Loader) -> tuple[list[Prompt], list[int]]:
        """This rank's next prompts, and the number of each among all prompts of the run.

        Raises `UserError` where there are fewer than a step takes.
        """
        table = source.plan.tokens
        self.usable = table.lengths > 0  # unreadable rows are empty
        if not self.counts.size:
            self.counts = np.zeros((2, len(table.lengths)), dtype=np.float32)
        size = source.batch.global_batch
        first = source.rows_done + self.draws * size
        self.drawn = self._draw(size)
        ranks = dist.get_world_size()
        rank = dist.get_rank()
        own = range(size * rank // ranks, size * (rank + 1) // ranks)
        asked = [prompt_of(int(self.drawn[place]), table) for place in own]
        return asked, [first + place for place in own]

    def _draw(self, count: int) -> np.ndarray:
        """The numbers of the next prompts of all ranks, int64 [count]."""
        if count > self.usable.sum():
            raise UserError(
                f"curriculum.by_success: a step has {count} prompts, each another one, and the "
                f"data {self.usable.sum()}: lower training.global_batch_size or batch_size."
            )
        solved, asked = self.counts.astype(np.float64)
        share = (solved + _PRIOR) / (asked + 2 * _PRIOR)
        generator = np.random.default_rng(random_key(self.seed, _STREAM, self.draws))
        # Each prompt has a random time, sooner by its weight; the first so many are drawn.
        times = generator.standard_exponential(len(share)) / (share * (1 - share))
        times[~self.usable] = math.inf
        self.draws += 1
        return np.argsort(times, kind="stable")[:count]

    def note(self, groups: Sequence[Group]) -> None:
        """Counts what the completions of the prompts that were drawn last are worth."""
        for prompt, group in zip(self.drawn, groups, strict=True):
            found = [times_solved(group, self.solved_at), len(group.rewards)]
            self.counts[:, prompt] = self.settings.success_decay * self.counts[:, prompt] + found

    def shares(self) -> dict[str, float | None]:
        """The shares of all prompts that were not drawn yet, or are solved never, always or not."""
        solved, asked = self.counts[:, self.usable]
        share = solved / np.maximum(asked, 1)
        is_new = asked == 0
        is_never = ~is_new & (share <= 1 - _ALWAYS)
        is_always = ~is_new & (share >= _ALWAYS)
        return {
            "prompts_new": float(is_new.mean()),
            "prompts_never_solved": float(is_never.mean()),
            "prompts_always_solved": float(is_always.mean()),
            "prompts_between": float((~is_new & ~is_never & ~is_always).mean()),
        }

    def state_dict(self) -> dict[str, int | Tensor]:
        """What a resumed run must know."""
        return {"draws": self.draws, "counts": torch.from_numpy(self.counts.copy())}

    def load_state_dict(self, state: dict[str, int | Tensor]) -> None:
        """Goes on from what `state_dict` gave."""
        self.draws = int(state["draws"])
        counts = state["counts"]
        assert isinstance(counts, Tensor), "counts are saved as a tensor"
        self.counts = counts.numpy().copy()


@contextmanager
def put_back_on_outage(source: Loader, successes: Successes | None) -> Iterator[None]:
    """A context in which prompts are as they were before, where a server is gone."""
    before = source.state_dict()
    counted = None if successes is None else successes.state_dict()
    try:
        yield
    except OutageError:
        source.load_state_dict(before)
        if successes is not None and counted is not None:
            successes.load_state_dict(counted)
        raise
