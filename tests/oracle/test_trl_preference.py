"""Losses of preference beside TRL's on the same batch with the same weights, in float32."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.config.objectives import PreferenceConfig
from lacuna.objective.preference import Preference
from lacuna.train.step import sums_of
from policies import batch_of, gradient_norm, one_rank, policy_of
from tiny import VOCABULARY, random_model, tiny_config, tokenizer_of_words
from trl_losses import (
    Outcome,
    Pair,
    apart,
    dpo,
    kto,
    mismatched,
    odds_ratio,
    simpo,
    smoothed_dpo,
)

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5

# What lacuna is set to ([preference]), case by case.
CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss": "sigmoid", "beta": 0.1},
    "sigmoid_large_beta": {"loss": "sigmoid", "beta": 0.7},
    "sigmoid_smoothed": {"loss": "sigmoid", "beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"loss": "ipo", "beta": 0.2},
    "hinge": {"loss": "hinge", "beta": 0.3},
    "orpo": {"loss": "orpo", "beta": 0.25},
    "simpo": {"loss": "simpo", "beta": 2.0, "margin": 1.0},
    "kto": {"loss": "kto", "beta": 0.1},
    "kto_of_negative_kl": {"loss": "kto", "beta": 0.1},
    "kto_weighted": {
        "loss": "kto",
        "beta": 0.4,
        "desirable_weight": 1.3,
        "undesirable_weight": 0.6,
    },
}

# What both log: TRL's name -> ours.
NAMES = {
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
    "kl": "divergence",
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(tiny_config("llama"), seed=1)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return random_model(tiny_config("llama"), seed=2)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Pairs of uneven lengths; answers end with the end of a text, as those of real data do."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()

    lengths = ((5, 3, 9), (2, 12, 4), (9, 1, 1), (3, 6, 17), (7, 8, 2))
    return [
        Pair(ids(prompt), [*ids(chosen), 2], [*ids(rejected), 2])
        for prompt, chosen, rejected in lengths
    ]


def models_of(
    name: str, model: PreTrainedModel, reference: PreTrainedModel
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model and the reference of a case; the other way round KTO's estimate is cut at 0."""
    return (reference, model) if name == "kto_of_negative_kl" else (model, reference)


def by_trl(
    model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair], settings: dict[str, Any]
) -> Outcome:
    """What TRL makes of the batch with lacuna's settings."""
    loss, beta = settings["loss"], settings["beta"]
    if "label_smoothing" in settings:
        return smoothed_dpo(model, reference, pairs, beta, settings["label_smoothing"])
    if loss == "kto":
        weights = {name: value for name, value in settings.items() if name.endswith("_weight")}
        return kto(model, reference, apart(pairs), beta=beta, **weights)
    if loss == "orpo":
        return odds_ratio(model, pairs, beta=beta)
    if loss == "simpo":
        return simpo(model, pairs, beta=beta, simpo_gamma=settings["margin"])
    return dpo(model, reference, pairs, loss_type=loss, beta=beta)


def by_lacuna(
    model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair], settings: dict[str, Any]
) -> Outcome:
    """What lacuna's objective makes of the same batch."""
    config = Config(preference=PreferenceConfig(**settings))
    objective = Preference()
    objective.check(config, tokenizer_of_words())
    if settings["loss"] == "kto":
        answers = apart(pairs)
        sequences, chosen = [], []
        for answer, other in zip(answers, mismatched(answers), strict=True):
            sequences += [(answer.prompt, answer.completion), (answer.prompt, other)]
            chosen += [float(answer.label)] * 2
        columns = {"chosen": chosen, "mismatched": [0.0, 1.0] * len(answers)}
    else:
        sequences = [
            (pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)
        ]
        columns = {"chosen": [1.0, 0.0] * len(pairs)}
    with one_rank():
        policy = policy_of(deepcopy(model), config)
        if objective.reference is not None:
            objective.reference.copy = policy_of(deepcopy(reference), config)
        batches = [batch_of(sequences, columns)]
        [batch] = objective.annotate(policy, batches, objective.loss)
        sums = sums_of(policy, batch, objective.loss)
        (sums[0] / batch.counts[objective.denominator]).backward()
        named = dict(zip(objective.loss.names, sums.tolist(), strict=True))
        row = objective.report(named, batch.counts)
        norm = gradient_norm(policy.model)
    metrics = {theirs: row[ours] for theirs, ours in NAMES.items() if ours in row}
    return Outcome(row["loss"], norm, metrics)


@pytest.mark.parametrize("name", CASES)
def test_lacuna_is_trl(
    name: str, model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair]
) -> None:
    model, reference = models_of(name, model, reference)
    ours = by_lacuna(model, reference, pairs, CASES[name])
    theirs = by_trl(model, reference, pairs, CASES[name])
    assert ours.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
    assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=TOLERANCE)
    for metric in NAMES:
        if metric in theirs.metrics:
            assert ours.metrics[metric] == pytest.approx(
                theirs.metrics[metric], rel=TOLERANCE, abs=TOLERANCE
            ), metric


@pytest.mark.parametrize("name", CASES)
def test_trl_is_the_papers_formula(
    name: str, model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair]
) -> None:
    model, reference = models_of(name, model, reference)
    theirs = by_trl(model, reference, pairs, CASES[name])
    loss, metrics = by_formula(model, reference, pairs, CASES[name])
    model.zero_grad()
    loss.backward()
    norm = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
    model.zero_grad()
    assert theirs.loss == pytest.approx(loss.item(), rel=TOLERANCE)
    assert theirs.gradient_norm == pytest.approx(norm, rel=TOLERANCE)
    for metric, value in metrics.items():
        assert theirs.metrics[metric] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), metric


def by_formula(
    model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair], settings: dict[str, Any]
) -> tuple[Tensor, dict[str, float]]:
    """The loss as the papers write it, one sequence at a time, and its rewards."""
    kind, beta = settings["loss"], settings["beta"]
    chosen = [(pair.prompt, pair.chosen) for pair in pairs]
    rejected = [(pair.prompt, pair.rejected) for pair in pairs]
    better = log_probabilities(model, chosen)
    worse = log_probabilities(model, rejected)
    if kind in ("orpo", "simpo"):
        better = better / lengths(chosen)
        worse = worse / lengths(rejected)
    else:
        better = better - log_probabilities(reference, chosen).detach()
        worse = worse - log_probabilities(reference, rejected).detach()
    metrics = {
        "rewards/chosen": beta * better.mean().item(),
        "rewards/rejected": beta * worse.mean().item(),
        "rewards/margins": beta * (better - worse).mean().item(),
        "rewards/accuracies": (better > worse).float().mean().item(),
    }
    if kind == "kto":
        kl = estimated_kl(model, reference, pairs)
        del metrics["rewards/accuracies"]  # of pairs, which KTO does not know
        return kto_loss(better, worse, kl, settings), metrics | {"kl": kl.item()}
    if kind == "ipo":
        difference = better / lengths(chosen) - worse / lengths(rejected)
        return ((difference - 1 / (2 * beta)) ** 2).mean(), metrics
    if kind == "orpo":
        log_odds = log_odds_of(better) - log_odds_of(worse)
        return cross_entropy(model, pairs) - beta * F.logsigmoid(log_odds).mean(), metrics
    logits = beta * (better - worse)
    if kind == "hinge":
        return (1 - logits).relu().mean(), metrics
    logits = logits - settings.get("margin", 0.0)
    smoothing = settings.get("label_smoothing", 0.0)
    losses = (1 - smoothing) * -F.logsigmoid(logits) + smoothing * -F.logsigmoid(-logits)
    return losses.mean(), metrics


def kto_loss(better: Tensor, worse: Tensor, kl: Tensor, settings: dict[str, Any]) -> Tensor:
    """The mean over all answers, each weighted by its kind."""
    beta = settings["beta"]
    desirable = 1 - torch.sigmoid(beta * (better - kl))
    undesirable = 1 - torch.sigmoid(beta * (kl - worse))
    weighted = (
        settings.get("desirable_weight", 1.0) * desirable,
        settings.get("undesirable_weight", 1.0) * undesirable,
    )
    return torch.cat(weighted).mean()


def estimated_kl(model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair]) -> Tensor:
    """KTO's estimate, at least 0: the mean log ratio of completions that answer another prompt."""
    answers = apart(pairs)
    others = [(a.prompt, other) for a, other in zip(answers, mismatched(answers), strict=True)]
    with torch.no_grad():
        ratios = log_probabilities(model, others) - log_probabilities(reference, others)
    return ratios.mean().clamp(min=0)


def log_odds_of(mean_log_probability: Tensor) -> Tensor:
    """log(p / (1 - p)) of p, the geometric mean of the tokens' probabilities."""
    return mean_log_probability - torch.log1p(-mean_log_probability.exp())


def cross_entropy(model: PreTrainedModel, pairs: list[Pair]) -> Tensor:
    """The mean over all tokens of prompts and chosen answers but the first of each row."""
    whole = [(pair.prompt[:1], pair.prompt[1:] + pair.chosen) for pair in pairs]
    return -log_probabilities(model, whole).sum() / lengths(whole).sum()


def lengths(sequences: list[tuple[list[int], list[int]]]) -> Tensor:
    """How many tokens each answer has."""
    return torch.tensor([float(len(answer)) for _, answer in sequences])


def log_probabilities(
    model: PreTrainedModel, sequences: list[tuple[list[int], list[int]]]
) -> Tensor:
    """The summed log-probability of each answer after its prompt."""
    sums = []
    for prompt, answer in sequences:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
        tokens = logits[len(prompt) - 1 : -1].log_softmax(-1)
        sums.append(tokens[torch.arange(len(answer)), torch.tensor(answer)].sum())
    return torch.stack(sums)
