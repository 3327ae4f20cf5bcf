"""Which objective a run has, by its task."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from lacuna.config.imported import imported
from lacuna.data import Batch
from lacuna.model.build import BuiltModel
from lacuna.model.head import TokenLoss

_TASKS = {
    "pretrain": "lacuna.objective.language_modelling:LanguageModelling",
    "sft": "lacuna.objective.language_modelling:ChatModelling",
}


class Objective(Protocol):
    """What a run minimises: all that the loop is told of language modelling or anything else.

    Attributes:
        trains_on: what its data are.
        denominator: the count of a step that the summed loss is divided by.
        loss: what is minimised, and summed to be reported.
        held_out_loss: what is summed over held-out data.
    """

    trains_on: Literal["texts", "conversations"]
    denominator: str
    loss: TokenLoss
    held_out_loss: TokenLoss

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of a step with all columns and counts that the loss takes; may run models."""

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """What the log has of a step, by the sums of its loss and its counts, over all ranks."""

    def report_held_out(
        self, sums: dict[str, float], counts: dict[str, float]
    ) -> dict[str, float | None]:
        """The same of held-out data; `val_loss` is what stages, patience and the best checkpoint go by."""

    def state_dict(self) -> dict[str, object]:
        """What a resumed run must know of it, in plain numbers and text."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Goes on from what `state_dict` gave."""


def find_objective(task: str) -> Objective:
    """A new objective of this task."""
    make: Callable[[], Any] = imported(_TASKS.get(task, task))
    return make()
