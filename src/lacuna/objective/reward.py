"""Reward models: a score for each answer, such that the better one of a pair gets more."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.data import Batch
from lacuna.model.build import BuiltModel
from lacuna.model.kind import is_scoring
from lacuna.model.loss import Columns, Loss, SequenceLoss, Sums
from lacuna.objective.language_modelling import LanguageModelling

NAMES = ("loss", "score_chosen", "score_rejected", "right")


def reward_sums(scores: Tensor, columns: Columns) -> Sums:
    """Bradley and Terry's loss of pairs (arXiv 2203.02155, equation 1), and scores, summed.

    `scores` are [sequences]; the answers of a pair stand side by side, the chosen one first. The
    loss is the negative log-probability that the chosen one wins, the difference being its logit.
    """
    chosen, rejected = scores.view(-1, 2).unbind(1)
    return {
        "loss": -F.logsigmoid(chosen - rejected).sum(),
        "score_chosen": chosen.detach().sum(),
        "score_rejected": rejected.detach().sum(),
        "right": (chosen > rejected).sum(),
    }


def padding_of(own: int | None, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that transformers' models that score look past: the model's `own`, if it has one.

    Else it is the tokenizer's, or the end of text.
    """
    known = (own, tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((one for one in known if isinstance(one, int)), None)


def with_last_places(batch: Batch, padding: int | None) -> Batch:
    """The batch with the column `scored`, int64 [B, T]: which tokens sequences are scored at.

    It is the number of a sequence, counted from 1, at its last token that is not `padding`, as in
    transformers' own models, or at its first token where all of them are; else 0.
    """
    ids = batch.columns["input_ids"].flatten()
    real = batch.columns["real"].flatten()
    numbers = batch.columns["sequence"].flatten()[real]
    places = torch.arange(len(ids))[real]
    count = len(batch.sequence_columns["chosen"])
    first = torch.full((count,), len(ids)).scatter_reduce(0, numbers, places, "amin")
    counted = torch.where(ids[real] == padding, -1, places) if padding is not None else places
    last = torch.full((count,), -1).scatter_reduce(0, numbers, counted, "amax")
    last = torch.where(last < 0, first, last)
    scored = torch.zeros_like(ids).scatter(0, last, torch.arange(1, count + 1))
    return replace(batch, columns=batch.columns | {"scored": scored.view(batch.shape)})


class Reward(LanguageModelling):
    """Trains a model to score answers by pairs of which one is better."""

    trains_on = "preferences"
    denominator = "pairs"
    loss: Loss = SequenceLoss(reward_sums, NAMES, of_scores=True)
    held_out_loss: Loss = loss
    padding: int | None = None

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses nothing; keeps the tokenizer, which may say what padding is."""
        self.tokenizer = tokenizer

    def prepare(self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]) -> None:
        """Notes in the model's configuration what padding is, by which transformers scores.

        Raises `UserError` for a model that makes text, which the task of another name would have.
        """
        if not is_scoring(policy.model.config):
            raise UserError(
                "job.task: a model that scores is made for reward alone: set it to reward, or do "
                "not inherit from its objective."
            )
        # Only now: a model that is made with it would not learn the embedding of this token.
        text_config = policy.model.config.get_text_config()
        self.padding = padding_of(text_config.pad_token_id, self.tokenizer)
        text_config.pad_token_id = self.padding

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """Adds which tokens sequences are scored at."""
        return [with_last_places(batch, self.padding) for batch in batches]

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """The loss, the scores, and the share of pairs whose better answer gets more, per pair."""
        total = max(counts["pairs"], 1)
        means = {name: sums[name] / total for name in NAMES}
        margin = means["score_chosen"] - means["score_rejected"]
        accuracy = means.pop("right")
        return {**means, "score_margin": margin, "score_accuracy": accuracy}

    def report_held_out(
        self, sums: dict[str, float], counts: dict[str, float]
    ) -> dict[str, float | None]:
        """The same of held-out pairs."""
        return {f"val_{name}": value for name, value in self.report(sums, counts).items()}
