"""The losses of GRPO and its kin beside TRL's on the same completions, in float32."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.model.loss import TokenLoss
from lacuna.objective.grpo import grpo_targets
from lacuna.objective.grpo_losses import NAMES, grpo_sums
from lacuna.objective.sample_batches import with_log_ratios
from lacuna.objective.sample_rows import lay_out
from lacuna.rollout.groups import Sample
from lacuna.train.step import accumulate_gradients, total_counts
from policies import one_rank, policy_of
from tiny import VOCABULARY, random_model, tiny_config
from trl_grpo import Trained, grpo

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5
LONGEST = 12

# What lacuna is set to ([grpo]), and TRL for the same, case by case.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": ({}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "grpo": ({"loss": "grpo"}, {"loss_type": "grpo"}),
    "grpo_wide": (
        {"loss": "grpo", "epsilon": 0.1, "epsilon_high": 0.5},
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.5},
    ),
    "dr_grpo": ({"loss": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "gspo": (
        {"loss": "gspo", "epsilon": 0.02, "epsilon_high": 0.03},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.02,
            "epsilon_high": 0.03,
        },
    ),
    "cispo": (
        {"loss": "cispo", "epsilon_high": 0.3},
        {"loss_type": "cispo", "epsilon_high": 1.3},
    ),
    "dual_clip": (
        {"dual_clip": 1.4},
        {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.4},
    ),
    "k3": (
        {"beta": 0.3},
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "k3_plain": (
        {"beta": 0.3, "kl": "k3_plain", "loss": "grpo"},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(tiny_config("llama"), seed=1)


@pytest.fixture(scope="module")
def samples() -> list[Trained]:
    """Completions of uneven lengths, whose old log-probabilities lie near those of the model."""
    generator = torch.Generator().manual_seed(0)
    drawn = partial(torch.randint, 4, VOCABULARY, generator=generator)
    found = []
    lengths = ((5, 3), (2, 12), (9, 1), (3, 7))
    advantages = (1.2, -0.7, 0.4, -0.9)
    for (prompt, completion), advantage in zip(lengths, advantages, strict=True):
        ids = drawn((prompt + completion,)).tolist()
        found.append(Trained(ids[:prompt], ids[prompt:], advantage, [], []))
    return found


def near(model: PreTrainedModel, samples: list[Trained], temperature: float) -> list[Trained]:
    """The samples with old and reference log-probabilities, at random beside the model's own."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for one in samples:
        ids = torch.tensor([one.prompt + one.tokens])
        with torch.no_grad():
            logits = model(ids).logits[0, len(one.prompt) - 1 : -1] / temperature
        own = logits.log_softmax(-1).gather(-1, torch.tensor(one.tokens)[:, None])[:, 0]
        noise = torch.randn(2, len(own), generator=generator)
        old, reference = (own + 0.3 * noise[0]).tolist(), (own + 0.5 * noise[1]).tolist()
        found.append(one._replace(old=old, reference=reference))
    return found


def by_lacuna(
    model: PreTrainedModel, samples: list[Trained], temperature: float, settings: dict[str, Any]
) -> tuple[float, torch.Tensor]:
    """The loss and the gradients as the loop has them, in micro-batches of one packed row."""
    config = Config(
        grpo=settings,
        rollout={"temperature": temperature, "max_tokens": LONGEST},
        training={"batch_size": 1, "seq_len": 20},
    )
    loss = TokenLoss(partial(grpo_sums, settings=config.grpo, temperature=temperature), NAMES)
    with one_rank():
        policy = policy_of(deepcopy(model), config)
        own = [
            Sample(one.prompt, one.tokens, one.old, True, 0, one.advantage, one.old, one.reference)
            for one in samples
        ]
        rows = (config.training, config.row_form, config.data)
        batches = lay_out(own, *rows, 0, grpo_targets(config.grpo, config.rollout)).batches
        assert len(batches) > 1
        if config.grpo.loss == "gspo":
            batches = [with_log_ratios(policy, batch, temperature) for batch in batches]
        by_tokens = config.grpo.loss in ("dapo", "cispo")
        denominator = "trained_tokens" if by_tokens else "sequences"
        divisor = total_counts(policy, batches)[denominator]
        sums = accumulate_gradients(policy, batches, loss, divisor)
        gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
        return (sums[0] / divisor).item(), torch.cat(gradients)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_trl(
    name: str, temperature: float, model: PreTrainedModel, samples: list[Trained]
) -> None:
    ours, theirs = CASES[name]
    samples = near(model, samples, temperature)
    loss, gradients = by_lacuna(model, samples, temperature, ours)
    wanted, expected = grpo(model, samples, temperature, LONGEST, **theirs)
    assert loss == pytest.approx(wanted, rel=TOLERANCE, abs=1e-7)
    assert (gradients - expected).norm() < TOLERANCE * expected.norm()
