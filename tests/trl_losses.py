"""What TRL's own trainers make of a batch: loss, gradient norm and metrics, from plain token ids.

Whatever imports this module is skipped where TRL is not installed: it is no dependency. Models are
copied first, because TRL replaces methods of those that it is given.
"""

import os
import tempfile
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from policies import gradient_norm
from tiny import tokenizer_of_words

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")
cpo = pytest.importorskip("trl.experimental.cpo")
orpo = pytest.importorskip("trl.experimental.orpo")
gkd = pytest.importorskip("trl.experimental.gkd")
distillation = pytest.importorskip("trl.trainer.distillation_trainer")

PAD = 0
IGNORED = -100


class Pair(NamedTuple):
    """Token ids of a prompt and two answers to it."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class Answer(NamedTuple):
    """Token ids of a prompt and one answer, and whether it is desirable."""

    prompt: list[int]
    completion: list[int]
    label: bool


class Outcome(NamedTuple):
    """What a batch gives: the loss, the norm of all gradients, and what is logged by name."""

    loss: float
    gradient_norm: float
    metrics: dict[str, float]


def apart(pairs: list[Pair]) -> list[Answer]:
    """The answers of pairs one by one, in TRL's order: first all that are chosen."""
    chosen = [Answer(pair.prompt, pair.chosen, True) for pair in pairs]
    rejected = [Answer(pair.prompt, pair.rejected, False) for pair in pairs]
    return chosen + rejected


def mismatched(answers: list[Answer]) -> list[list[int]]:
    """For each prompt the completion of the row before, from which KTO's KL is estimated."""
    completions = [answer.completion for answer in answers]
    return completions[-1:] + completions[:-1]


def dpo(
    model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair], **settings: Any
) -> Outcome:
    """TRL's DPOTrainer with `loss_type`, `beta` and so on.

    Its sigmoid loss ignores `label_smoothing`; `smoothed_dpo` has it.
    """
    rows = {"prompt": ["w4"], "chosen": ["w5"], "rejected": ["w6"]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.DPOTrainer(
            model=deepcopy(model),
            ref_model=deepcopy(reference),
            args=trl.DPOConfig(folder, **_plain(len(pairs)), **settings),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer_of_words(),
        )
        batch = trainer.data_collator(
            [
                {"prompt_ids": p.prompt, "chosen_ids": p.chosen, "rejected_ids": p.rejected}
                for p in pairs
            ]
        )
        return _outcome(trainer, batch, trainer._metrics["train"])


def smoothed_dpo(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    pairs: list[Pair],
    beta: float,
    label_smoothing: float,
) -> Outcome:
    """DPO with smoothed labels, in TRL's only loss that has them: `aot`, which sorts the batch.

    One pair at a time there is nothing to sort. The norm is of the mean gradient of all pairs.
    """
    settings = {"loss_type": "aot", "beta": beta, "label_smoothing": label_smoothing}
    rows = {"prompt": ["w4"], "chosen": ["w5"], "rejected": ["w6"]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.DPOTrainer(
            model=deepcopy(model),
            ref_model=deepcopy(reference),
            args=trl.DPOConfig(folder, **_plain(1), **settings),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer_of_words(),
        )
        trainer.model.train()
        loss = torch.zeros(())
        for p in pairs:
            row = {"prompt_ids": p.prompt, "chosen_ids": p.chosen, "rejected_ids": p.rejected}
            loss = loss + trainer.compute_loss(trainer.model, trainer.data_collator([row]))
        loss = loss / len(pairs)
        loss.backward()
        logged = trainer._metrics["train"]
        means = {name: sum(values) / len(values) for name, values in logged.items()}
        return Outcome(loss.item(), gradient_norm(trainer.model), means)


def kto(
    model: PreTrainedModel, reference: PreTrainedModel, answers: list[Answer], **settings: Any
) -> Outcome:
    """TRL's KTOTrainer, its KL estimated as it does: with the completion of the row before."""
    rows = {"prompt": ["w4", "w4"], "completion": ["w5", "w6"], "label": [True, False]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.KTOTrainer(
            model=deepcopy(model),
            ref_model=deepcopy(reference),
            args=trl.KTOConfig(folder, **_plain(len(answers)), **settings),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer_of_words(),
        )
        batch = trainer.data_collator(
            [
                {
                    "prompt_ids": answer.prompt,
                    "completion_ids": answer.completion,
                    "KL_completion_ids": other,
                    "label": answer.label,
                }
                for answer, other in zip(answers, mismatched(answers), strict=True)
            ]
        )
        return _outcome(trainer, batch, trainer._metrics["train"])


def simpo(model: PreTrainedModel, pairs: list[Pair], **settings: Any) -> Outcome:
    """TRL's CPOTrainer as SimPO: without the cross-entropy that CPO adds."""
    settings = {"loss_type": "simpo", "cpo_alpha": 0.0, **settings}
    return _reference_free(cpo.CPOTrainer, cpo.CPOConfig, model, pairs, settings)


def odds_ratio(model: PreTrainedModel, pairs: list[Pair], **settings: Any) -> Outcome:
    """TRL's ORPOTrainer, whose cross-entropy is that of prompt and chosen answer."""
    return _reference_free(orpo.ORPOTrainer, orpo.ORPOConfig, model, pairs, settings)


def generalised_jsd(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    answers: list[Answer],
    beta: float,
    temperature: float,
) -> Outcome:
    """TRL's divergence of whole logits (GKD): 0 is the forward and 1 the reverse KL."""
    student = deepcopy(student)
    ids, mask, labels = _padded(answers)
    student_logits = student(input_ids=ids, attention_mask=mask).logits
    with torch.no_grad():
        teacher_logits = teacher(input_ids=ids, attention_mask=mask).logits
    loss = gkd.GKDTrainer.generalized_jsd_loss(
        student_logits[:, :-1], teacher_logits[:, :-1], labels[:, 1:], beta, temperature
    )
    loss.backward()
    return Outcome(loss.item(), gradient_norm(student), {})


def chunked_jsd(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    answers: list[Answer],
    beta: float,
    temperature: float,
) -> Outcome:
    """The same as TRL's DistillationTrainer has it, chunk by chunk, and the student's entropy."""
    student = deepcopy(student)
    ids, mask, labels = _padded(answers)
    hidden = student.model(input_ids=ids, attention_mask=mask).last_hidden_state
    with torch.no_grad():
        teacher_hidden = teacher.model(input_ids=ids, attention_mask=mask).last_hidden_state
    loss, entropy, count = distillation._chunked_divergence_loss(
        hidden[:, :-1],
        teacher_hidden[:, :-1],
        student.lm_head.weight,
        teacher.lm_head.weight,
        labels[:, 1:] != IGNORED,
        beta,
        temperature=temperature,
    )
    loss.backward()
    metrics = {"entropy": (entropy / count).item()}
    return Outcome(loss.item(), gradient_norm(student), metrics)


def _plain(batch_size: int) -> dict[str, Any]:
    """Settings of every trainer: float32 on the CPU, nothing written."""
    return {
        "per_device_train_batch_size": batch_size,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
    }


def _outcome(trainer: Any, batch: dict[str, Tensor], logged: dict[str, list[float]]) -> Outcome:
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    metrics = {name: values[-1] for name, values in logged.items()}
    return Outcome(loss.item(), gradient_norm(trainer.model), metrics)


def _reference_free(
    kind: Any, config: Any, model: PreTrainedModel, pairs: list[Pair], settings: dict[str, Any]
) -> Outcome:
    rows = {"prompt": ["w4"], "chosen": [" w5"], "rejected": [" w6"]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            model=deepcopy(model),
            args=config(folder, remove_unused_columns=False, **_plain(len(pairs)), **settings),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer_of_words(),
        )
        batch = trainer.data_collator([_tokenized(pair) for pair in pairs])
        return _outcome(trainer, batch, trainer._stored_metrics["train"])


def _tokenized(pair: Pair) -> dict[str, list[int]]:
    """A pair as these trainers' own tokenising leaves it."""
    columns = {"prompt_input_ids": pair.prompt, "prompt_attention_mask": [1] * len(pair.prompt)}
    for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        columns[f"{name}_input_ids"] = pair.prompt + answer
        columns[f"{name}_attention_mask"] = [1] * len(pair.prompt + answer)
        columns[f"{name}_labels"] = [IGNORED] * len(pair.prompt) + answer
    return columns


def _padded(answers: list[Answer]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and labels, padded on the right; only completions are trained."""
    longest = max(len(answer.prompt + answer.completion) for answer in answers)
    ids = torch.full((len(answers), longest), PAD)
    mask = torch.zeros((len(answers), longest), dtype=torch.long)
    labels = torch.full((len(answers), longest), IGNORED)
    for row, answer in enumerate(answers):
        end = len(answer.prompt + answer.completion)
        ids[row, :end] = torch.tensor(answer.prompt + answer.completion)
        mask[row, :end] = 1
        labels[row, len(answer.prompt) : end] = torch.tensor(answer.completion)
    return ids, mask, labels
