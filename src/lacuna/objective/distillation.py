"""Distillation: the distribution of a larger model over the next token, learnt by a smaller one."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError, explained
from lacuna.config.objectives import DistillationConfig
from lacuna.config.sections import LoraConfig, ModelConfig, QuantizationConfig
from lacuna.data import Batch
from lacuna.data.packing import IGNORED
from lacuna.data.tokenizer import grown_tokenizer
from lacuna.model.build import BuiltModel, build_frozen
from lacuna.model.forward import head_input
from lacuna.model.head import Head
from lacuna.model.lora import whole_tensor
from lacuna.model.loss import Columns, Loss, Sums, TokenLoss
from lacuna.objective.language_modelling import LanguageModelling
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
    """The divergence from the teacher and the cross-entropy of the labels, mixed, over trained tokens.

    The teacher's logits are made here from the column `teacher_states`. Both distributions are over
    the first `words` tokens, where one has more logits than there are. As in TRL, the divergence is
    not multiplied by the squared temperature.
    """
    labels = columns["labels"]
    temperature = settings.temperature
    student = (logits[:, :words] / temperature).log_softmax(-1)
    found = teacher_logits(columns["teacher_states"])
    teacher = (found[:, :words] / temperature).log_softmax(-1)
    distance = (divergence(teacher, student, settings) * (labels != IGNORED)).sum()
    nats = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    loss = settings.alpha * distance + (1 - settings.alpha) * nats
    return {"loss": loss, "divergence": distance, "cross_entropy": nats}


@dataclass(frozen=True)
class TeacherHead:
    """The teacher's head, whole on every rank: what makes logits of a chunk of its hidden states."""

    weight: Tensor
    bias: Tensor | None
    head: Head

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [tokens, vocabulary], float32, of hidden states [tokens, width]."""
        return self.head.logits(F.linear(states.to(self.weight.dtype), self.weight, self.bias))


class Distillation(LanguageModelling):
    """Trains on what a teacher finds likely, mixed with what the data say."""

    loss = TokenLoss(distillation_sums, NAMES)  # given its teacher by prepare
    settings = DistillationConfig()
    teacher: BuiltModel | None = None
    words: int | None = None

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `UserError` for a teacher of another vocabulary."""
        self.settings = config.distillation
        if self.settings.teacher is not None:
            check_vocabulary(config, tokenizer)

    def prepare(self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]) -> None:
        """Builds the teacher, spread over the ranks as the model is."""
        if self.settings.teacher is not None:
            with explained("distillation.teacher", UserError, mend="choose another teacher"):
                config = teacher_config(policy.config)
                tokenizer = grown_tokenizer(config.model)
                teacher = build_frozen(config, tokenizer, policy.mesh, policy.device)
            widths = {one.model.config.get_text_config().vocab_size for one in (policy, teacher)}
            self.words = len(tokenizer) if len(widths) > 1 else None
            self.use_teacher(teacher)

    def use_teacher(self, teacher: BuiltModel) -> None:
        """Learns from this model from now on.

        Raises `UserError` for one whose logits cannot be made chunk by chunk.
        """
        if not teacher.head.chunked:
            raise UserError(
                "distillation.teacher: its head does more than lacuna knows, so that its logits "
                "cannot be made chunk by chunk: choose another teacher."
            )
        self.teacher = teacher
        if teacher.has_head:
            linear = teacher.stages[-1].module.get_output_embeddings()
            bias = None if linear.bias is None else whole_tensor(linear.bias)
            head = TeacherHead(whole_tensor(linear.weight).detach(), bias, teacher.head)
            self.loss = self._loss(head)

    def _loss(self, teacher_logits: Callable[[Tensor], Tensor]) -> TokenLoss:
        of = partial(
            distillation_sums,
            settings=self.settings,
            teacher_logits=teacher_logits,
            words=self.words,
        )
        return TokenLoss(of, NAMES)

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """Adds the teacher's hidden states; held-out batches, measured by cross-entropy, need none."""
        if self.teacher is None or loss is self.held_out_loss:
            return batches
        return [self._with_states(self.teacher, batch) for batch in batches]

    def _with_states(self, teacher: BuiltModel, batch: Batch) -> Batch:
        with inference(*(stage.module for stage in teacher.stages)):
            states = teacher.read(batch, head_input)
        if states is None:
            return batch
        return replace(batch, own_columns=batch.own_columns | {"teacher_states": states})

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """The loss and its two parts, in nats per trained token."""
        trained = max(counts["trained_tokens"], 1)
        return {name: sums[name] / trained for name in NAMES}


def teacher_config(config: Config) -> Config:
    """The settings of a run whose model is the teacher: the same layout, its own weights."""
    settings = config.distillation
    model = ModelConfig(
        name_or_path=settings.teacher,
        trust_remote_code=config.model.trust_remote_code,
        attention=config.model.attention,
    )
    base = QuantizationConfig(base=settings.teacher_base)
    return config.model_copy(update={"model": model, "lora": LoraConfig(), "quantization": base})


def check_vocabulary(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `UserError` unless the teacher's tokenizer has the same tokens as the model's."""
    theirs = grown_tokenizer(teacher_config(config).model).get_vocab()
    ours = tokenizer.get_vocab()
    if theirs == ours:
        return
    token, number = min(ours.items() ^ theirs.items(), key=lambda pair: (pair[1], pair[0]))
    of = "the model" if (token, number) in ours.items() else "the teacher"
    raise UserError(
        f"distillation.teacher: {config.distillation.teacher} has another vocabulary: token "
        f"{number} is {token!r} for {of} alone: choose a teacher with the model's tokenizer."
    )
