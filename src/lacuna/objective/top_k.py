"""Distillation from a teacher's likeliest tokens: each is an outcome, all others are one more."""

import math

import torch
from torch import Tensor

from lacuna.config.objectives import DistillationConfig
from lacuna.model.loss import Columns, Sums
from lacuna.objective.distillation import divergence, mixed_sums


def outcomes(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens `ids` [tokens, k], and last of all others together.

    That of the others is the sum of what they are given, [tokens, k + 1] in all. It is not 1 less
    the rest, of which nothing would be left where the likeliest tokens have nearly everything.
    """
    rest = logits.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    found = torch.cat([logits.gather(-1, ids), rest], dim=-1)
    return found - logits.logsumexp(-1, keepdim=True)


def likeliest(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ids of the likeliest tokens [tokens, k], and the log-probabilities of these outcomes."""
    ids = logits.topk(top_k).indices
    return ids, outcomes(logits, ids)


def top_k_sums(logits: Tensor, columns: Columns, settings: DistillationConfig, words: int) -> Sums:
    """As `distillation_sums`, by the columns `teacher_ids` and `teacher_logprobs`.

    Both distributions are over the first `words` tokens.
    """
    student = outcomes(logits[:, :words], columns["teacher_ids"].long())
    each = divergence(columns["teacher_logprobs"], student, settings)
    return mixed_sums(each, logits, columns["labels"], settings.alpha)
