"""On-policy distillation: a teacher's distribution at each token of the model's own completions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.data import Batch, Loader
from lacuna.model.build import BuiltModel
from lacuna.model.loss import Loss
from lacuna.objective.critic import SecondModel
from lacuna.objective.distillation import Distillation
from lacuna.objective.language_modelling import FrozenModel
from lacuna.objective.on_policy import OnPolicy
from lacuna.objective.sample_rows import Targets
from lacuna.objective.teacher import build_teacher
from lacuna.objective.worth import functions_of
from lacuna.rollout.groups import Group, statistics


class OnPolicyDistillation(OnPolicy):
    """Draws completions as all that learn from them do, and learns them as distillation does.

    This is GKD (arXiv 2306.13649) where all completions are the student's own. Drawing has no
    gradient. Completions are trained whatever they are worth, whether they ended or not.

    Attributes:
        taught: the distillation: its teacher, its loss.
    """

    taught: Distillation

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `UserError` for rewards, ends or a teacher that cannot be had."""
        self.taught = Distillation()
        self.taught.check(config, tokenizer)
        self.begin(config, tokenizer, functions_of(config), updates=1)
        self.targets = Targets(lambda samples: {}, lambda sample: True)

    def frozen_models(self, config: Config) -> dict[str, FrozenModel]:
        """The teacher. At most it sees a row for each completion."""
        found = Distillation().frozen_models(config)
        return {name: replace(one, rows=config.rollout.samples) for name, one in found.items()}

    def prepare(
        self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]
    ) -> SecondModel | None:
        """Builds the teacher, and loads models that score.

        Raises `UserError` for a teacher that does not know all ids that the model may say.
        """
        super().prepare(policy, all_batches)
        teacher = build_teacher(self.config, policy.mesh, policy.device)
        own, theirs = (one.model.config.get_text_config().vocab_size for one in (policy, teacher))
        if own > theirs:
            raise UserError(
                f"distillation.teacher: it has rows for {theirs:,} tokens and the model for "
                f"{own:,}, so that it cannot read all that the model may say: choose another "
                "teacher, or begin from a model with fewer rows."
            )
        # All that the student may say is taught, ids without a token among it.
        self.taught.words = own if own < theirs else None
        self.taught.use_teacher(teacher)
        self.loss = self.taught.loss
        return None

    def roll_out(self, policy: BuiltModel, source: Loader) -> list[Group]:
        """New completions of all ranks, on every rank."""
        groups = self.draw(policy, source)
        self.told = statistics(groups)
        # Nothing is learnt from rewards, so that groups without a difference are no loss.
        unknown = ["reward_deviation", "flat_groups"]
        unwritten = ["advantage"]
        if not self.functions:
            unknown.append("reward")
            unwritten += ["reward", "scores"]
        for name in unknown:
            del self.told[name]
        self.keep(groups, leave_out=unwritten)
        return groups

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """Adds the teacher's hidden states."""
        return self.taught.annotate(policy, batches, loss)

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """The divergence in nats per token, and what the newest completions are like."""
        return {"loss": sums["loss"] / max(counts["trained_tokens"], 1), **self.told}
