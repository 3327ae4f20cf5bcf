"""A step of distillation on completions that the student itself draws, in this process."""

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.objective.on_policy_distillation import OnPolicyDistillation
from lacuna.rollout.groups import Sample
from lacuna.rollout.sampling import generate
from lacuna.train.step import accumulate_gradients, total_counts
from policies import one_rank, policy_of
from tiny import random_model, tiny_config, tokenizer_of_words

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20], [21, 22, 23]]

# Settings of [distillation], case by case.
CASES: dict[str, dict[str, Any]] = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "reverse_kl_cold": {"divergence": "reverse_kl", "temperature": 0.7},
    "jsd": {"divergence": "jsd", "beta": 0.5},
    "jsd_near_the_teacher": {"divergence": "jsd", "beta": 0.1},
    "jsd_near_the_student": {"divergence": "jsd", "beta": 0.9, "temperature": 1.5},
}


class Step(NamedTuple):
    """What was drawn, and what came of it: the loss, and all gradients one behind the other."""

    samples: list[Sample]
    loss: float
    gradients: Tensor


def student_and_teacher(**more: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A student that likes to end, and a teacher of another size with the same vocabulary.

    `more` is of the teacher's configuration.
    """
    student = random_model(tiny_config("llama"), seed=1)
    with torch.no_grad():
        student.get_output_embeddings().weight[2] *= 3
    changes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    return student, random_model(tiny_config("llama", **changes, **more), seed=2)


def gradients_of(model: PreTrainedModel) -> Tensor:
    """All gradients of a model, one behind the other."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def step_by_lacuna(
    student: PreTrainedModel, teacher: PreTrainedModel, settings: dict[str, Any], folder: Path
) -> Step:
    """What lacuna's objective makes of the student's own completions, in packed micro-batches.

    `folder` is filled with the teacher.
    """
    teacher.save_pretrained(folder)
    tokenizer_of_words().save_pretrained(folder)
    config = Config(
        job={"task": "distill"},
        distillation={"data": "prompts", "teacher": str(folder), **settings},
        rollout={"samples": 2, "max_tokens": 9, "temperature": 0.8},
        training={"batch_size": 1, "seq_len": 20},
    )
    objective = OnPolicyDistillation()
    with one_rank():
        policy = policy_of(deepcopy(student), config)
        objective.check(config, tokenizer_of_words())
        objective.prepare(policy, list)
        drawn = generate(policy, PROMPTS, range(4), config.rollout, objective.ends, seed=1)
        samples = [
            Sample(prompt, one.tokens, one.logprobs, one.ended)
            for prompt, group in zip(PROMPTS, drawn, strict=True)
            for one in group
        ]
        batches = objective.laid_out(samples, objective.targets).batches
        assert 1 < len(batches) < len(samples), "several are packed"
        batches = objective.annotate(policy, batches, objective.loss)
        counts = total_counts(policy, batches)
        divisor = counts[objective.denominator]
        sums = accumulate_gradients(policy, batches, objective.loss, divisor)
        named = dict(zip(objective.loss.names, sums.tolist(), strict=True))
        row = objective.report(named, {name: one.item() for name, one in counts.items()})
        return Step(samples, row["loss"], gradients_of(policy.model))
