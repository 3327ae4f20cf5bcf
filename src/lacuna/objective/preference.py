"""Preference (DPO and its kin): which of two answers is better, by their log-probabilities."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.config.objectives import PreferenceConfig
from lacuna.data import Batch
from lacuna.data.packing import IGNORED, prompt_labels
from lacuna.model.build import BuiltModel
from lacuna.model.loss import Columns, Loss, SequenceLoss, Sums
from lacuna.objective.dropout import leave_out_dropout
from lacuna.objective.language_modelling import FrozenModel, LanguageModelling
from lacuna.objective.reference import (
    Reference,
    reference_kind,
    with_divergence,
    with_sequence_column,
)


def pair_losses(chosen: Tensor, rejected: Tensor, settings: PreferenceConfig) -> Tensor:
    """The loss of each pair [pairs] by what its answers are worth.

    An answer is worth its log-probability, or the ratio of it to the reference's. The losses are
    sigmoid: DPO (arXiv 2305.18290, equation 7), smoothed as in its conservative form; ipo: arXiv
    2310.12036, equation 17; hinge: SLiC (arXiv 2305.10425); simpo: arXiv 2405.14734, equation 6.
    """
    difference = chosen - rejected
    if settings.loss == "ipo":
        return (difference - 1 / (2 * settings.beta)).square()
    if settings.loss == "hinge":
        return F.relu(1 - settings.beta * difference)
    margin = settings.margin if settings.loss == "simpo" else 0.0
    won = settings.beta * difference - margin
    smoothing = settings.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(won) - smoothing * F.logsigmoid(-won)


def odds_ratio_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """ORPO's loss of each pair [pairs] by mean log-probabilities (arXiv 2403.07691, equation 7)."""
    # the odds of an answer that is certain are infinite, and their gradient is no number
    log_odds = [mean - torch.log1p(-mean.clamp(max=-1e-6).exp()) for mean in (chosen, rejected)]
    return -F.logsigmoid(log_odds[0] - log_odds[1])


def answer_losses(worth: Tensor, columns: Columns, settings: PreferenceConfig) -> Tensor:
    """KTO's loss of each answer that is good or bad by itself (arXiv 2402.01306, equation 8)."""
    above = settings.beta * (worth - columns["divergence"])
    good = settings.desirable_weight * torch.sigmoid(-above)
    bad = settings.undesirable_weight * torch.sigmoid(above)
    return torch.where(columns["chosen"] > 0, good, bad)


def preference_sums(logprobs: Tensor, columns: Columns, settings: PreferenceConfig) -> Sums:
    """The loss and the rewards, summed over pairs, or answers with kto.

    `logprobs` and `columns` are [sequences]. The answers of a pair stand side by side, the chosen
    one first. With kto each answer is followed by another row's answer to the same prompt, which
    serves to measure the divergence alone.
    """
    mean = logprobs / columns["tokens"].clamp(min=1)
    worth = logprobs - columns["reference"] if settings.needs_reference else mean
    rewards = settings.beta * worth.detach()
    if settings.loss == "kto":
        counted = 1 - columns["mismatched"]
        good = columns["chosen"] * counted
        losses = answer_losses(worth, columns, settings)
        return {
            "loss": (losses * counted).sum(),
            "reward_chosen": (rewards * good).sum(),
            "reward_rejected": (rewards * (counted - good)).sum(),
            "chosen": good.sum(),
            "divergence": (columns["divergence"] * counted).sum(),
        }
    chosen, rejected = worth.view(-1, 2).unbind(1)
    if settings.loss == "orpo":
        nats = -(logprobs + columns["prompt_logprobs"]) * columns["pairs_per_token"]
        losses = nats.view(-1, 2)[:, 0] + settings.beta * odds_ratio_losses(chosen, rejected)
    elif settings.loss == "ipo":
        tokens = columns["tokens"].clamp(min=1).view(-1, 2)
        losses = pair_losses(chosen / tokens[:, 0], rejected / tokens[:, 1], settings)
    else:
        losses = pair_losses(chosen, rejected, settings)
    return {
        "loss": losses.sum(),
        "reward_chosen": rewards.view(-1, 2)[:, 0].sum(),
        "reward_rejected": rewards.view(-1, 2)[:, 1].sum(),
        "right": (chosen > rejected).sum(),
    }


class Preference(LanguageModelling):
    """Trains on pairs of answers, or on answers with a label, mostly relative to a reference."""

    trains_on = "preferences"
    settings = PreferenceConfig()
    reference: Reference | None = None

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `UserError` where the reference would not be what training begins with."""
        self.settings = config.preference
        folder = str(config.job.dump_folder)
        kind = reference_kind(self.settings, config.lora, config.checkpoint, folder)
        self.reference = None if kind is None else Reference(kind, config)
        is_kto = self.settings.loss == "kto"
        extra = ("chosen", "divergence") if is_kto else ("right",)
        names = ("loss", "reward_chosen", "reward_rejected", *extra)
        self.denominator = "sequences" if is_kto else "pairs"
        self.loss = SequenceLoss(partial(preference_sums, settings=self.settings), names)
        self.held_out_loss = self.loss

    def frozen_models(self, config: Config) -> dict[str, FrozenModel]:
        """The frozen copy, where that is the reference."""
        folder = str(config.job.dump_folder)
        kind = reference_kind(config.preference, config.lora, config.checkpoint, folder)
        return {"preference.reference": FrozenModel(config)} if kind == "copy" else {}

    def prepare(self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]) -> None:
        """Makes the reference, where the loss has one, and leaves the model's dropout out."""
        leave_out_dropout(policy.model)
        if self.reference is not None:
            self.reference.prepare(policy, all_batches)

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """Adds what the loss takes of the reference, and of the step as a whole."""
        if self.reference is not None:
            batches = [self.reference.annotate(policy, batch) for batch in batches]
        if self.settings.loss == "kto":
            return with_divergence(policy, batches)
        if self.settings.loss == "orpo":
            return with_prompts(policy, batches)
        return batches

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """The loss and rewards of a step, per pair, or per answer with kto."""
        total = max(counts[self.denominator], 1)
        chosen = sums.get("chosen", total)
        rejected = total - chosen if "chosen" in sums else total
        row: dict[str, float | None] = {"loss": sums["loss"] / total}
        better = sums["reward_chosen"] / chosen if chosen else None
        worse = sums["reward_rejected"] / rejected if rejected else None
        row |= {"reward_chosen": better, "reward_rejected": worse}
        row["reward_margin"] = None if better is None or worse is None else better - worse
        if "right" in sums:
            row["reward_accuracy"] = sums["right"] / total
        else:
            row["divergence"] = sums["divergence"] / total
        return row

    def report_held_out(
        self, sums: dict[str, float], counts: dict[str, float]
    ) -> dict[str, float | None]:
        """The same of held-out pairs or answers."""
        return {f"val_{name}": value for name, value in self.report(sums, counts).items()}

    def state_dict(self) -> dict[str, object]:
        """What the reference said of every sequence, where it was computed before training."""
        return {"reference": self.reference.known if self.reference else {}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes what `state_dict` gave."""
        if self.reference is not None:
            self.reference.load(cast(dict[str, float], state["reference"]))


def with_prompts(policy: BuiltModel, batches: Sequence[Batch]) -> list[Batch]:
    """Batches of a step with what ORPO needs to learn the prompts of chosen answers as well.

    That is the labels of prompts, and how much a token weighs beside a pair.
    """
    annotated = []
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        labels = prompt_labels(batch)
        chosen = batch.sequence_columns["chosen"].bool()
        learnt = (labels != IGNORED) | (batch.columns["labels"] != IGNORED)
        if len(chosen):
            learnt = learnt & chosen[batch.columns["sequence"]]
        totals += torch.tensor([float(learnt.sum()), batch.counts["pairs"]], dtype=torch.float64)
        annotated.append(replace(batch, columns=batch.columns | {"prompt_labels": labels}))
    totals = totals.to(policy.device)
    dist.all_reduce(totals)
    share = (totals[1] / totals[0].clamp(min=1)).float()
    return [with_sequence_column(batch, "pairs_per_token", share) for batch in annotated]
