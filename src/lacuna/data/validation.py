"""The validation set as batches: every token of it once, and equally many batches on every rank."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.data.loader import open_rows
from lacuna.data.packing import Batch
from lacuna.data.plan import Plan, make_plan
from lacuna.data.tokenize import BrokenRecords


@dataclass(frozen=True)
class Validation:
    """Can be iterated any number of times; yields the same batches each time.

    Documents come in the source's order, packed like the training data; where rows are missing at the end there
    are rows of padding, whose labels are all -100.
    """

    plan: Plan
    dp_rank: int
    dp_world: int
    micro_batch: int
    most_batches: int | None

    def __iter__(self) -> Iterator[Batch]:
        rows, broken = open_rows(self.plan, {0: None}), BrokenRecords(self.plan.config.data.max_broken_records)
        first, size = self.dp_rank * self.micro_batch, self.dp_world * self.micro_batch
        for number in itertools.islice(itertools.count(), self.most_batches):
            group = [rows.row(number * size + within) for within in range(size)]
            broken.add(rows.broken)
            if not any(group):
                return
            yield self.plan.batch(group[first : first + self.micro_batch])


def build_validation(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, dp_rank: int, dp_world: int, micro_batch: int
) -> Validation:
    """The validation batches of one rank, at most validation.steps of them.

    Raises UserError when the data cannot be opened or holds no text.
    """
    setting = config.validation.resolved_source()
    assert setting is not None, "built only where the configuration has a validation source"
    plan = make_plan(config, tokenizer, [setting.model_copy(update={"weight": 1.0})], lanes=1, endless=False)
    steps = config.validation.steps if config.validation.steps >= 0 else None
    return Validation(plan, dp_rank, dp_world, micro_batch, steps)
