"""Divergences from a teacher beside TRL's on the same batch with the same weights, in float32."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.config.objectives import DistillationConfig
from lacuna.objective.distillation import Distillation
from lacuna.train.step import sums_of
from own_completions import CASES as OWN_CASES
from own_completions import step_by_lacuna, student_and_teacher
from policies import batch_of, gradient_norm, one_rank, policy_of
from tiny import VOCABULARY, random_model, tiny_config, tokenizer_of_words
from trl_losses import Answer, Outcome, chunked_jsd, generalised_jsd

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5

# What lacuna is set to ([distillation]), case by case.
CASES: dict[str, dict[str, Any]] = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd", "beta": 0.5},
    "jsd_near_the_teacher": {"divergence": "jsd", "beta": 0.1},
    "jsd_near_the_student": {"divergence": "jsd", "beta": 0.9},
    "forward_kl_warm": {"divergence": "forward_kl", "temperature": 2.0},
    "reverse_kl_cold": {"divergence": "reverse_kl", "temperature": 0.7},
    "jsd_warm": {"divergence": "jsd", "beta": 0.3, "temperature": 1.5},
}


@pytest.fixture(scope="module")
def student() -> PreTrainedModel:
    return random_model(tiny_config("llama"), seed=1)


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    """A teacher of another size, with the same vocabulary."""
    changes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    return random_model(tiny_config("llama", **changes), seed=2)


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Completions of uneven lengths, each after a prompt that is not trained."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()

    lengths = ((5, 3), (2, 12), (9, 1), (1, 17))
    return [Answer(ids(prompt), [*ids(completion), 2], True) for prompt, completion in lengths]


def by_trl(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    answers: list[Answer],
    settings: dict[str, Any],
) -> Outcome:
    """What TRL's chunked divergence makes of the batch with lacuna's settings."""
    temperature = settings.get("temperature", 1.0)
    return chunked_jsd(student, teacher, answers, trl_beta(settings), temperature)


def trl_beta(settings: dict[str, Any]) -> float:
    """TRL names the two ends of its one family by 0 and 1."""
    ends = {"forward_kl": 0.0, "reverse_kl": 1.0}
    return float(ends.get(settings["divergence"], settings.get("beta", 0.5)))


def by_lacuna(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    answers: list[Answer],
    settings: dict[str, Any],
) -> Outcome:
    """What lacuna's objective makes of the same batch, with `alpha` 1."""
    config = Config(distillation=DistillationConfig(**settings))
    objective = Distillation()
    objective.check(config, tokenizer_of_words())
    with one_rank():
        policy = policy_of(deepcopy(student), config)
        objective.use_teacher(policy_of(deepcopy(teacher), config))
        batches = [batch_of([(answer.prompt, answer.completion) for answer in answers])]
        [batch] = objective.annotate(policy, batches, objective.loss)
        sums = sums_of(policy, batch, objective.loss)
        (sums[0] / batch.counts[objective.denominator]).backward()
        named = dict(zip(objective.loss.names, sums.tolist(), strict=True))
        loss = objective.report(named, batch.counts)["loss"]
        return Outcome(loss, gradient_norm(policy.model), {})


@pytest.mark.parametrize("name", CASES)
def test_lacuna_is_trl(
    name: str, student: PreTrainedModel, teacher: PreTrainedModel, answers: list[Answer]
) -> None:
    ours = by_lacuna(student, teacher, answers, CASES[name])
    theirs = by_trl(student, teacher, answers, CASES[name])
    assert ours.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
    assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_both_of_trls_losses_are_the_papers_formula(
    name: str, student: PreTrainedModel, teacher: PreTrainedModel, answers: list[Answer]
) -> None:
    chunked = by_trl(student, teacher, answers, CASES[name])
    temperature = CASES[name].get("temperature", 1.0)
    whole = generalised_jsd(student, teacher, answers, trl_beta(CASES[name]), temperature)
    student.zero_grad()
    loss = by_formula(student, teacher, answers, CASES[name])
    loss.backward()
    norm = gradient_norm(student)
    student.zero_grad()
    for theirs in (chunked, whole):
        assert theirs.loss == pytest.approx(loss.item(), rel=TOLERANCE)
        assert theirs.gradient_norm == pytest.approx(norm, rel=TOLERANCE)


@pytest.mark.parametrize("name", OWN_CASES)
def test_on_the_students_own_completions_lacuna_is_trls_gkd(name: str, tmp_path: Path) -> None:
    student, teacher = student_and_teacher()
    settings = OWN_CASES[name]
    step = step_by_lacuna(student, teacher, settings, tmp_path)
    said = [Answer(one.prompt, one.tokens, True) for one in step.samples]
    temperature = settings.get("temperature", 1.0)
    theirs = generalised_jsd(student, teacher, said, trl_beta(settings), temperature)
    assert step.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
    assert step.gradients.double().norm() == pytest.approx(theirs.gradient_norm, rel=TOLERANCE)


def by_formula(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    answers: list[Answer],
    settings: dict[str, Any],
) -> Tensor:
    """The divergence as the paper writes it, one sequence at a time, mean over trained tokens."""
    temperature = settings.get("temperature", 1.0)
    losses = []
    for prompt, completion, _ in answers:
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            p = (teacher(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature).softmax(-1)
        q = (student(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature).softmax(-1)
        losses.append(divergence(p, q, settings))
    return torch.cat(losses).mean()


def divergence(p: Tensor, q: Tensor, settings: dict[str, Any]) -> Tensor:
    """Of the teacher `p` and the student `q`, token by token."""
    if settings["divergence"] == "forward_kl":
        return kl(p, q)
    if settings["divergence"] == "reverse_kl":
        return kl(q, p)
    beta = settings["beta"]
    mixture = beta * p + (1 - beta) * q
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of `q` from `p`."""
    return (p * (p.log() - q.log())).sum(-1)
