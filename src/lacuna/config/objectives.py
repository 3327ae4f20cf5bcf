"""The settings of what is minimised beyond next-token prediction: preference and distillation."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lacuna.config.fields import Path, Section, Temperature


class PreferenceConfig(Section):
    """How a model learns which of two answers is better (job.task = preference)."""

    loss: Literal["sigmoid", "ipo", "hinge", "orpo", "simpo", "kto"] = "sigmoid"
    """What pairs teach: sigmoid is DPO, ipo and hinge are its variants; orpo and simpo need no
    reference model; kto takes single answers with a label, or the two answers of a pair apart."""
    beta: PositiveFloat = 0.1
    """How far the model may move from the reference; the larger, the less. For ipo it is tau, for
    orpo the weight of the odds ratio beside the cross-entropy of the chosen answer."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs whose order is taken to be wrong; sigmoid and simpo only."""
    margin: NonNegativeFloat = 0.5
    """By how much the chosen answer should win, in simpo's rewards (its gamma)."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable answers in kto."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of undesirable answers in kto."""
    reference: Literal["auto", "base", "copy", "cached"] = "auto"
    """The model that rewards are measured from, which is what training begins with. base is the
    model with its adapters switched off, copy is a frozen copy, cached is computed once for every
    answer before training begins. auto is base where only new adapters are trained, else copy."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with what it was before training."""
        return self.loss not in ("orpo", "simpo")


class DistillationConfig(Section):
    """How a model learns from the distribution of a larger one (job.task = distill)."""

    teacher: Path | None = None
    """Hub id or folder of a Hugging Face model with the same vocabulary."""
    teacher_logprobs: Path | None = None
    """Folder of the teacher's likeliest tokens, which lacuna teach writes once; then no teacher is
    in memory. If teacher is given as well, the tokens must be that model's."""
    teacher_base: Literal["none", "int8", "nf4"] = "none"
    """How the teacher's linear layers and experts are stored; see quantization.base."""
    data: Literal["texts", "conversations", "prompts"] = "texts"
    """What the data are: texts, conversations whose answers are trained, or prompts, which the
    model itself answers as rollout.* says, to learn what the teacher finds likely there."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """How the distance from student to teacher is measured: forward_kl spreads the student over all
    that the teacher finds likely, reverse_kl keeps it to what is likeliest, jsd lies between the
    two."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """The teacher's share in jsd's mixture of teacher and student."""
    temperature: Temperature = Field(default=1.0, gt=0)
    """Divides the logits of teacher and student."""
    alpha: float = Field(default=1.0, gt=0, le=1)
    """Share of the divergence in the loss; the rest is the cross-entropy of the data."""

    @property
    def has_teacher(self) -> bool:
        """Whether there is a teacher, in memory or on disk."""
        return bool(self.teacher or self.teacher_logprobs)
