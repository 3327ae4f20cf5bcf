"""GRPO and its kin: the model learns its own completions by what they are worth."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.config.reinforcement import GrpoConfig, RolloutConfig
from lacuna.data import Batch, Loader
from lacuna.model.build import BuiltModel
from lacuna.model.loss import Loss, TokenLoss
from lacuna.objective.grpo_losses import NAMES, advantages_of, corrections_of, grpo_sums
from lacuna.objective.language_modelling import FrozenModel
from lacuna.objective.on_policy import OnPolicy
from lacuna.objective.reference import on_policy_reference_kind
from lacuna.objective.sample_batches import values_of_tokens, with_log_ratios
from lacuna.objective.sample_rows import Targets
from lacuna.objective.worth import functions_of, is_judged
from lacuna.rollout.groups import Group, Sample, statistics


def grpo_targets(settings: GrpoConfig, rollout: RolloutConfig) -> Targets:
    """What the losses of GRPO and its kin take of a sample."""
    return Targets(
        partial(_grpo_columns, settings=settings, longest=rollout.max_tokens),
        lambda one: is_judged(one) and (one.ended or not settings.mask_truncated),
    )


def _grpo_columns(
    samples: Sequence[Sample], settings: GrpoConfig, longest: int
) -> dict[str, Tensor]:
    counts = torch.tensor([len(one.tokens) for one in samples], dtype=torch.long)
    advantages = torch.tensor([one.advantage for one in samples], dtype=torch.float32)
    shares = torch.ones(len(samples))
    if settings.loss == "dr_grpo":
        shares = shares / longest
    elif settings.loss in ("grpo", "gspo"):
        shares = shares / counts
    old, sampled, reference = (
        values_of_tokens(samples, name) for name in ("old", "sampled", "reference")
    )
    return {
        "advantages": advantages.repeat_interleave(counts),
        "shares": shares.repeat_interleave(counts),
        "old_logprobs": old,
        "reference_logprobs": reference,
        "corrections": corrections_of(old, sampled, counts, settings),
    }


class Grpo(OnPolicy):
    """Trains on groups of the model's own completions, by their rewards."""

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `UserError` for rewards, ends or a reference that cannot be had."""
        settings = config.grpo
        self.kind = self._kind(config)
        self.begin(config, tokenizer, functions_of(config), settings.updates)
        self.targets = grpo_targets(settings, config.rollout)
        is_by_tokens = settings.loss in ("dapo", "cispo")
        self.denominator = "trained_tokens" if is_by_tokens else "sequences"
        of = partial(grpo_sums, settings=settings, temperature=config.rollout.temperature)
        self.loss = TokenLoss(of, NAMES)
        self.held_out_loss = self.loss

    def frozen_models(self, config: Config) -> dict[str, FrozenModel]:
        """The frozen copy, where that is the reference."""
        return {"grpo.reference": FrozenModel(config)} if self._kind(config) == "copy" else {}

    @staticmethod
    def _kind(config: Config) -> str | None:
        folder = str(config.job.dump_folder)
        return on_policy_reference_kind(config.grpo, config.lora, config.checkpoint, folder)

    def roll_out(self, policy: BuiltModel, source: Loader) -> list[Group]:
        """New groups of all ranks, on every rank: one for each prompt of a step.

        Where prompts may be drawn again, groups whose rewards vary come first.
        """
        settings = self.config.grpo
        drawn: list[Group] = []
        wanted = 0
        for _ in range(1 + settings.resample):
            drawn += self.draw(policy, source)
            wanted = wanted or len(drawn)
            if sum(group.varies for group in drawn) >= wanted:
                break
        advantages = advantages_of([group.rewards for group in drawn], settings).tolist()
        for group, own in zip(drawn, advantages, strict=True):
            for sample, advantage in zip(group.samples, own, strict=True):
                sample.advantage = advantage
            group.note_rewards()
        self.told = statistics(drawn)
        self.keep(drawn)
        if len(drawn) > wanted:
            drawn.sort(key=lambda group: not group.varies)
        return drawn[:wanted]

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """Adds the ratios of whole completions, where gspo needs them."""
        if self.config.grpo.loss != "gspo":
            return batches
        temperature = self.config.rollout.temperature
        return [with_log_ratios(policy, batch, temperature) for batch in batches]

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """The loss, what the newest completions are worth, and means over trained tokens."""
        trained = max(counts["trained_tokens"], 1)
        row: dict[str, float | None] = {"loss": sums["loss"] / max(counts[self.denominator], 1)}
        row |= self.told
        row |= {name: sums[name] / trained for name in ("entropy", "clipped")}
        if self.kind is not None:
            row["divergence"] = sums["divergence"] / trained
        return row
