"""Which objective a run has, by its task."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.config.user_code import import_attribute
from lacuna.data import Batch, Loader
from lacuna.model.build import BuiltModel
from lacuna.model.loss import Loss
from lacuna.objective.language_modelling import FrozenModel

if TYPE_CHECKING:  # an extension
    from lacuna.objective.critic import SecondModel

_TASKS = {
    "pretrain": "lacuna.objective.language_modelling:LanguageModelling",
    "sft": "lacuna.objective.language_modelling:ChatModelling",
    "distill": "lacuna.objective.distillation:Distillation",
    "preference": "lacuna.objective.preference:Preference",
    "grpo": "lacuna.objective.grpo:Grpo",
    "reward": "lacuna.objective.reward:Reward",
    "ppo": "lacuna.objective.ppo:Ppo",
}
# The same where the data are prompts, which the model is to answer.
_TASKS_OF_PROMPTS = {
    **_TASKS,
    "distill": "lacuna.objective.on_policy_distillation:OnPolicyDistillation",
}


class Objective(Protocol):
    """What a run minimises: all that the loop is told of language modelling or anything else.

    `check` and `frozen_models` are given the whole configuration, because nobody knows what of it
    an objective of a user's own reads.

    Attributes:
        trains_on: what its data are.
        denominator: the count of a step that the summed loss is divided by.
        loss: what is minimised, and summed to be reported.
        held_out_loss: what is summed over held-out data.
    """

    trains_on: Literal["texts", "conversations", "preferences", "prompts"]
    denominator: str
    loss: Loss
    held_out_loss: Loss

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Called before anything is built; raises `UserError` for settings that cannot be had."""

    def frozen_models(self, config: Config) -> dict[str, FrozenModel]:
        """The models that `prepare` will build, by the setting that asks for each."""

    def prepare(
        self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]
    ) -> "SecondModel | None":
        """Called once the model has its weights; may build other models.

        One that is returned is trained, saved and resumed beside the first. `all_batches` goes
        over all training and held-out data once, in this rank's micro-batches.
        """

    def next_step(self, policy: BuiltModel, source: Loader) -> Sequence[Batch]:
        """The micro-batches of the next step, of the data or of what the model generates."""

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """The micro-batches with all columns and counts that `loss` takes; may run models."""

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """What the log has of a step, first its loss.

        `sums` are those of the loss, `counts` those of the batches, over all ranks.
        """

    def report_held_out(
        self, sums: dict[str, float], counts: dict[str, float]
    ) -> dict[str, float | None]:
        """What the log has of held-out data.

        Its `val_loss` decides on stages of the curriculum, patience and the best checkpoint.
        """

    def state_dict(self) -> dict[str, object]:
        """What a resumed run must know of the objective, in plain numbers and text."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Goes on from what `state_dict` gave."""


def find_objective(task: str, trains_on: str = "") -> Objective:
    """A new objective of this task, where its data are such as `trains_on` says."""
    tasks = _TASKS_OF_PROMPTS if trains_on == "prompts" else _TASKS
    make: Callable[[], Objective] = import_attribute(tasks.get(task, task))
    return make()
