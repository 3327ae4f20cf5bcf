"""PPO: the model learns its own completions by what they are worth beyond what a critic expects."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.config.reinforcement import PpoConfig
from lacuna.config.row_form import RowForm
from lacuna.data import Batch, Loader
from lacuna.data.tokenizer import grown_tokenizer
from lacuna.model.build import BuiltModel
from lacuna.model.loss import TokenLoss
from lacuna.objective.critic import (
    SecondModel,
    build_critic,
    check_critic,
    critic_config,
    is_apart,
    values_of_samples,
)
from lacuna.objective.dropout import leave_out_dropout
from lacuna.objective.grpo_losses import corrections_of
from lacuna.objective.language_modelling import FrozenModel
from lacuna.objective.on_policy import OnPolicy
from lacuna.objective.ppo_losses import (
    NAMES,
    VALUE_NAMES,
    advantages_and_returns,
    next_coefficient,
    ppo_sums,
    token_rewards,
    value_sums,
)
from lacuna.objective.reference import on_policy_reference_kind, require_files_of_model
from lacuna.objective.sample_batches import by_sample, passed_on, values_of_tokens
from lacuna.objective.sample_rows import Targets
from lacuna.objective.worth import functions_of, is_judged
from lacuna.rollout.groups import Group, Sample, statistics

# Keeps advantages finite where all of them are the same.
_SMALLEST_DEVIATION = 1e-8


def _columns_of(samples: Sequence[Sample], settings: PpoConfig) -> dict[str, Tensor]:
    names = {"advantages": "advantages", "old_logprobs": "old"}
    names |= {"values": "values", "returns": "returns"}
    columns = {column: values_of_tokens(samples, name) for column, name in names.items()}
    counts = torch.tensor([len(one.tokens) for one in samples], dtype=torch.long)
    sampled = values_of_tokens(samples, "sampled")
    columns["corrections"] = corrections_of(columns["old_logprobs"], sampled, counts, settings)
    return columns


def whitened(values: Tensor) -> Tensor:
    """Values less the mean of all ranks' values, divided by their deviation, [values]."""
    sums = torch.stack([values.sum(), values.new_tensor(len(values))])
    dist.all_reduce(sums)
    count = sums[1].clamp(min=1)
    centred = values - sums[0] / count
    square = centred.square().sum()
    dist.all_reduce(square)
    return centred / ((square / count).sqrt() + _SMALLEST_DEVIATION)


class Ppo(OnPolicy):
    """Trains on the model's own completions, by their rewards and a critic, which is trained too.

    Attributes:
        coefficient: what a nat of divergence from the reference costs now.
        of_critic: this rank's batches of the newest completions for a critic that is spread
            otherwise than the model; empty until they are made.
    """

    coefficient: float
    critic: BuiltModel
    of_critic: Sequence[Batch] = ()

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `UserError` for rewards, ends, a reference or a critic that cannot be had."""
        settings = config.ppo
        self.kind = self._kind(config)
        self.begin(config, tokenizer, functions_of(config), settings.updates)
        check_critic(config, tokenizer)
        if settings.critic is None:
            folder = str(config.job.dump_folder)
            require_files_of_model("ppo.critic", "name one, or ", config.checkpoint, folder)
        self.targets = Targets(partial(_columns_of, settings=settings), is_judged)
        of = partial(ppo_sums, settings=settings, temperature=config.rollout.temperature)
        self.loss = TokenLoss(of, NAMES)
        self.held_out_loss = self.loss
        self.coefficient = settings.beta

    def frozen_models(self, config: Config) -> dict[str, FrozenModel]:
        """The critic, which is trained, and the frozen copy where that is the reference."""
        found = {"ppo.critic": FrozenModel(critic_config(config), is_trained=True)}
        if self._kind(config) == "copy":
            found["ppo.reference"] = FrozenModel(config)
        return found

    @staticmethod
    def _kind(config: Config) -> str | None:
        folder = str(config.job.dump_folder)
        return on_policy_reference_kind(config.ppo, config.lora, config.checkpoint, folder, "ppo")

    def prepare(
        self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]
    ) -> SecondModel | None:
        """Builds the critic, and what else completions are judged by."""
        super().prepare(policy, all_batches)
        settings = self.config.ppo
        tokenizer = grown_tokenizer(self.config.model)
        self.critic = build_critic(self.config, tokenizer, policy.mesh, policy.device)
        leave_out_dropout(self.critic.model)
        loss = TokenLoss(partial(value_sums, settings=settings), VALUE_NAMES)
        first = self.config.optimizer.lr
        rate = settings.critic_lr / first if settings.critic_lr else 1.0
        own = (
            partial(self._batches_of_critic, policy)
            if is_apart(self.config.critic_parallelism)
            else None
        )
        return SecondModel("critic", self.critic, loss, rate, own)

    def roll_out(self, policy: BuiltModel, source: Loader) -> list[Group]:
        """New completions of all ranks, on every rank."""
        groups = self.draw(policy, source)
        for group in groups:
            group.note_rewards()
        self.told = statistics(groups)
        for name in ("reward_deviation", "flat_groups"):
            del self.told[name]
        self.keep(groups, leave_out=("advantage",))
        return groups

    def note_findings(self, policy: BuiltModel, own: list[Sample]) -> None:
        """Notes log-probabilities and values, and what follows: advantages and returns."""
        super().note_findings(policy, own)
        for sample, found in zip(own, self._values(policy, own), strict=True):
            sample.values = found
        self.of_critic = ()
        judged = [sample for sample in own if is_judged(sample)]
        self._note_advantages(judged, policy.device)
        apart = [sum(sample.old) - sum(sample.reference) for sample in judged if sample.reference]
        sums = torch.tensor([sum(apart), len(apart)], dtype=torch.float64, device=policy.device)
        dist.all_reduce(sums)
        if self.kind is not None:
            divergence = (sums[0] / sums[1].clamp(min=1)).item()
            self.told |= {"divergence": divergence, "beta": self.coefficient}
            target = self.config.ppo.kl_target
            if target is not None and sums[1]:
                self.coefficient = next_coefficient(self.coefficient, divergence, target)

    def _values(self, policy: BuiltModel, own: list[Sample]) -> list[list[float]]:
        """What the critic expects before each token of this rank's samples."""
        if not is_apart(self.config.critic_parallelism):
            return values_of_samples(self.critic, self.own_rows(own), own)
        groups = passed_on(self.own, policy, self.critic, self.exchange)
        asked = [*chain.from_iterable(groups)]
        laid = self.laid_out(asked, self.targets.only_read(), self._form_of_critic)
        found = iter(values_of_samples(self.critic, laid, asked))
        values = [[next(found) for _ in group] for group in groups]
        return [*chain.from_iterable(passed_on(values, self.critic, policy, self.exchange))]

    @property
    def _form_of_critic(self) -> RowForm:
        """The form of the rows that a critic takes which is spread otherwise than the model."""
        is_shared = critic_config(self.config).row_form.is_shared
        return replace(self.config.row_form, is_shared=is_shared)

    def _batches_of_critic(self, policy: BuiltModel) -> Sequence[Batch]:
        """This rank's batches of a step for a critic that is spread otherwise than the model.

        All steps on the same completions have the same.
        """
        if not self.of_critic:
            groups = passed_on(self.own, policy, self.critic, self.exchange)
            samples = [*chain.from_iterable(groups)]
            self.of_critic = self.laid_out(samples, self.targets, self._form_of_critic).batches
        return self.of_critic

    def _note_advantages(self, judged: list[Sample], device: torch.device) -> None:
        settings = self.config.ppo
        counts = [len(sample.tokens) for sample in judged]
        lengths = torch.tensor(counts, dtype=torch.long)
        is_token = torch.arange(max(counts, default=1)) < lengths[:, None]
        old, reference, expected = (
            torch.zeros(is_token.shape, dtype=torch.float64).masked_scatter(is_token, flat)
            for flat in (
                values_of_tokens(judged, name, torch.float64)
                for name in ("old", "reference", "values")
            )
        )
        is_compared = torch.tensor([bool(one.reference) for one in judged], dtype=torch.bool)
        apart = torch.where(is_compared[:, None], old - reference, 0.0)
        worth = torch.tensor([one.reward for one in judged], dtype=torch.float64)
        ended = torch.tensor([one.ended for one in judged], dtype=torch.bool)
        earned = token_rewards(worth, ended, lengths, apart, self.coefficient, settings)
        advantages, returns = advantages_and_returns(
            earned, expected, settings.gamma, settings.gae_lambda
        )
        better = by_sample(whitened(advantages[is_token].to(device)), judged)
        returned = by_sample(returns[is_token], judged)
        for sample, own, later in zip(judged, better, returned, strict=True):
            sample.advantages = own
            sample.returns = later

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """The losses, what the newest completions are worth, and means over trained tokens."""
        trained = max(counts["trained_tokens"], 1)
        means = {name: value / trained for name, value in sums.items()}
        return {
            "loss": means["loss"],
            "critic_loss": means["critic_loss"],
            **self.told,
            **{name: means[name] for name in ("entropy", "clipped", "moved")},
            "critic_clipped": means["critic_clipped"],
            "critic_grad_norm": sums["critic_norm"],
        }

    def state_dict(self) -> dict[str, object]:
        """What is kept of completions, and what a nat of divergence costs."""
        kept = {"coefficient": self.coefficient, "beta": self.config.ppo.beta}
        return super().state_dict() | kept

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Goes on from what `state_dict` gave, but for a `ppo.beta` that is another now."""
        super().load_state_dict(state)
        settings = self.config.ppo
        if settings.kl_target is not None and state.get("beta", settings.beta) == settings.beta:
            self.coefficient = cast(float, state["coefficient"])
