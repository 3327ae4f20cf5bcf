"""Distillation: the distribution of a larger model over the next token, learnt by a smaller one."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.config.objectives import DistillationConfig
from lacuna.data import Batch
from lacuna.data.packing import IGNORED
from lacuna.data.tokenizer import rows_of_tokens
from lacuna.model.build import BuiltModel
from lacuna.model.forward import head_input
from lacuna.model.loss import Columns, Loss, Sums, TokenLoss
from lacuna.objective.language_modelling import FrozenModel, LanguageModelling
from lacuna.objective.teacher import (
    build_teacher,
    check_vocabulary,
    stored_by,
    teacher_config,
    teacher_head,
    teacher_tokenizer,
)
from lacuna.parallel.fsdp import inference

NAMES = ("loss", "divergence", "cross_entropy")


def divergence(teacher: Tensor, student: Tensor, settings: DistillationConfig) -> Tensor:
    """How far the student's distribution is from the teacher's, nats [tokens].

    Both are log-probabilities [tokens, outcomes]. jsd is the generalised Jensen-Shannon divergence
    of GKD (arXiv 2306.13649, equation 1), with the teacher's share `beta` of the mixture.
    """
    if settings.divergence == "forward_kl":
        return kl_divergence(teacher, student)
    if settings.divergence == "reverse_kl":
        return kl_divergence(student, teacher)
    beta = settings.beta
    parts = torch.stack([teacher + math.log(beta), student + math.log1p(-beta)])
    mixture = parts.logsumexp(0)
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)


def kl_divergence(of: Tensor, beside: Tensor) -> Tensor:
    """KL(of, beside) of log-probabilities [tokens, outcomes], nats [tokens]; 0 log 0 is 0."""
    difference = torch.where(of == -math.inf, 0.0, of - beside)
    return (of.exp() * difference).sum(-1)


def distillation_sums(
    logits: Tensor,
    columns: Columns,
    settings: DistillationConfig,
    teacher_logits: Callable[[Tensor], Tensor],
    words: int | None,
) -> Sums:
    """The divergence from the teacher and the cross-entropy of the labels, mixed.

    Both are over trained tokens. The teacher's logits are made here from the column
    `teacher_states`. Both distributions are over the first `words` ids, where one has logits of
    others. As in TRL, the divergence is not multiplied by the squared temperature.
    """
    labels = columns["labels"]
    temperature = settings.temperature
    student = (logits[:, :words] / temperature).log_softmax(-1)
    found = teacher_logits(columns["teacher_states"])
    teacher = (found[:, :words] / temperature).log_softmax(-1)
    return mixed_sums(divergence(teacher, student, settings), logits, labels, settings.alpha)


def mixed_sums(each: Tensor, logits: Tensor, labels: Tensor, alpha: float) -> Sums:
    """The divergences of `each` token and the cross-entropy of its label, mixed and summed."""
    distance = (each * (labels != IGNORED)).sum()
    nats = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    loss = alpha * distance + (1 - alpha) * nats
    return {"loss": loss, "divergence": distance, "cross_entropy": nats}


class Distillation(LanguageModelling):
    """Trains on what a teacher finds likely, mixed with what the data say."""

    # `prepare` gives it the teacher that it lacks here.
    loss: Loss = TokenLoss(distillation_sums, NAMES)  # type: ignore[arg-type]
    config: Config
    settings = DistillationConfig()
    teacher: BuiltModel | None = None
    words: int | None = None
    stored: dict[str, str] | None = None  # checksums of what the teacher said, where it is on disk

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `UserError` for a teacher of another vocabulary."""
        self.config = config
        self.settings = config.distillation
        if self.settings.teacher_logprobs is not None:
            from lacuna.objective.top_k import top_k_sums

            self.stored = stored_by(self.settings)
            of = partial(top_k_sums, settings=self.settings, words=rows_of_tokens(tokenizer))
            self.loss = TokenLoss(of, NAMES)
        elif self.settings.teacher is not None:
            check_vocabulary(self.settings, config.model, tokenizer)

    def prepare(self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]) -> None:
        """Builds the teacher, spread over the ranks as the model is."""
        if self.settings.teacher is not None and self.stored is None:
            teacher = build_teacher(self.config, policy.mesh, policy.device)
            tokenizer = teacher_tokenizer(self.settings, self.config.model)
            widths = {one.model.config.get_text_config().vocab_size for one in (policy, teacher)}
            self.words = rows_of_tokens(tokenizer) if len(widths) > 1 else None
            self.use_teacher(teacher)

    def use_teacher(self, teacher: BuiltModel) -> None:
        """Learns from this model from now on."""
        self.teacher = teacher
        if teacher.has_head:
            of = partial(
                distillation_sums,
                settings=self.settings,
                teacher_logits=teacher_head(teacher),
                words=self.words,
            )
            self.loss = TokenLoss(of, NAMES)

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """Adds the teacher's hidden states, but not to held-out batches, which need none."""
        if self.teacher is None or loss is self.held_out_loss:
            return batches
        return [self._with_states(self.teacher, batch) for batch in batches]

    def _with_states(self, teacher: BuiltModel, batch: Batch) -> Batch:
        with inference(*(stage.module for stage in teacher.stages)):
            states = teacher.read(batch, head_input)
        if states is None:
            return batch
        return replace(batch, own_columns=batch.own_columns | {"teacher_states": states})

    def frozen_models(self, config: Config) -> dict[str, FrozenModel]:
        """The teacher, where there is one to ask: not where what it said is on disk."""
        if config.distillation.teacher is None or config.distillation.teacher_logprobs is not None:
            return {}
        return {"distillation.teacher": FrozenModel(teacher_config(config), keeps_states=True)}

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """The loss and its two parts, in nats per trained token."""
        trained = max(counts["trained_tokens"], 1)
        return {name: sums[name] / trained for name in NAMES}

    def state_dict(self) -> dict[str, object]:
        """What tells what the teacher said, where that is on disk."""
        return {"teacher_logprobs": self.stored}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Raises `UserError` where the run learnt from something else so far."""
        if state.get("teacher_logprobs") != self.stored:
            raise UserError(
                "distillation.teacher_logprobs: it is not what the run learnt from so far; take "
                "the change back, or start a new run."
            )
