"""Which objective a run has, by its task."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.config.imported import imported
from lacuna.data import Batch, Loader
from lacuna.model.build import BuiltModel
from lacuna.model.loss import Loss

_TASKS = {
    "pretrain": "lacuna.objective.language_modelling:LanguageModelling",
    "sft": "lacuna.objective.language_modelling:ChatModelling",
    "distill": "lacuna.objective.distillation:Distillation",
    "preference": "lacuna.objective.preference:Preference",
}


class Objective(Protocol):
    """What a run minimises: all that the loop is told of language modelling or anything else.

    Attributes:
        trains_on: what its data are.
        denominator: the count of a step that the summed loss is divided by.
        loss: what is minimised, and summed to be reported.
        held_out_loss: what is summed over held-out data.
    """

    trains_on: Literal["texts", "conversations", "preferences"]
    denominator: str
    loss: Loss
    held_out_loss: Loss

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Before anything is built: raises `UserError` for settings that cannot be had."""

    def prepare(self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]) -> None:
        """Once the model has the weights that training begins or goes on with; may build others.

        `all_batches` goes over all training and held-out data once, in this rank's micro-batches.
        """

    def next_step(self, policy: BuiltModel, source: Loader) -> Sequence[Batch]:
        """The micro-batches of the next step: of the data, or of what the model makes of them."""

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """The micro-batches of a step with all columns and counts that `loss` takes; may run models."""

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """What the log has of a step, by the sums of its loss and its counts, over all ranks.

        The first is the loss.
        """

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
