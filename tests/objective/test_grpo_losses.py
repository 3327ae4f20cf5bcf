"""The losses of GRPO and its kin are the papers' formulas, and divergences have right gradients."""

import math

import pytest
import torch
from torch import Tensor

from lacuna.config.reinforcement import GrpoConfig
from lacuna.objective.grpo_losses import (
    advantages_of,
    corrections_of,
    divergences,
    grpo_sums,
    policy_losses,
)

NAN = math.nan


def test_advantages_are_by_group_and_scaled_by_its_deviation() -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]]
    plain = advantages_of(rewards, GrpoConfig(scale="none"))
    assert plain.tolist() == [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]]
    assert torch.equal(advantages_of(rewards, GrpoConfig(loss="dr_grpo")), plain)
    scaled = advantages_of(rewards, GrpoConfig())
    assert torch.allclose(scaled[0], plain[0] / (math.sqrt(1 / 3) + 1e-4))
    assert scaled[1].tolist() == [0] * 4


def test_a_reward_that_does_not_apply_is_no_part_of_its_group() -> None:
    three = advantages_of([[3.0, 0.0, 1.5]], GrpoConfig())[0].tolist()
    found = advantages_of([[3.0, NAN, 0.0, 1.5], [NAN, 7.0, NAN, NAN], [NAN] * 4], GrpoConfig())
    assert found[0].tolist() == pytest.approx([three[0], 0, three[1], three[2]])
    assert found[1:].tolist() == [[0] * 4] * 2


def losses(ratio: float, advantage: float, **settings: object) -> tuple[float, float]:
    """The loss of a token and its derivative by the token's log-probability."""
    logprob = torch.tensor([-2.0], requires_grad=True)
    ratios = ratio * (logprob - logprob.detach()).exp()
    loss = policy_losses(ratios, logprob, torch.tensor([advantage]), GrpoConfig(**settings))
    loss.sum().backward()
    return loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss", "gradient"),
    [
        (1.1, 2.0, {}, -2.2, -2.2),
        (1.5, 2.0, {}, -2.56, 0.0),
        (1.5, 2.0, {"loss": "grpo"}, -2.4, 0.0),
        (1.5, -2.0, {}, 3.0, 3.0),
        (0.5, -2.0, {}, 1.6, 0.0),
        (0.5, 2.0, {}, -1.0, -1.0),
        (4.0, -2.0, {}, 6.0, 0.0),
        (4.0, -2.0, {"dual_clip": 1e9}, 8.0, 8.0),
        (2.0, -2.0, {"dual_clip": 3.0}, 4.0, 4.0),
        (4.0, 2.0, {"dual_clip": 3.0}, -2.56, 0.0),
        (1.001, 2.0, {"loss": "gspo"}, -2.0008, 0.0),
        (7.0, 2.0, {"loss": "cispo"}, 20.0, -10.0),
        (7.0, -2.0, {"loss": "cispo", "epsilon_high": 1.0}, -8.0, 4.0),
        (0.1, 2.0, {"loss": "cispo"}, 0.4, -0.2),
    ],
)
def test_losses_of_tokens_are_the_formulas(
    ratio: float, advantage: float, settings: dict, loss: float, gradient: float
) -> None:
    assert losses(ratio, advantage, **settings) == pytest.approx((loss, gradient), rel=1e-5)


def test_what_a_bound_keeps_from_learning_counts_as_clipped() -> None:
    logits = torch.zeros(6, 4)
    ratios = torch.tensor([4.0, 2.0, 0.5, 1.5, 0.5, 4.0])
    columns = {
        "labels": torch.tensor([0, 1, 2, 3, 0, 1]),
        "advantages": torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, 0.0]),
        "old_logprobs": logits.log_softmax(-1)[:, 0] - ratios.log(),
        "corrections": torch.ones(6),
        "shares": torch.ones(6),
    }
    # The first by dual clip, the third and fourth by the two bounds.
    assert grpo_sums(logits, columns, GrpoConfig(), 1.0)["clipped"] == 3
    assert grpo_sums(logits, columns, GrpoConfig(dual_clip=1e9), 1.0)["clipped"] == 2
    # Which keeps the gradient of bad tokens, and clips others above 5.
    assert grpo_sums(logits, columns, GrpoConfig(loss="cispo"), 1.0)["clipped"] == 0
    bounded = GrpoConfig(loss="cispo", epsilon_high=2.5)
    assert grpo_sums(logits, columns, bounded, 1.0)["clipped"] == 1


def expected_gradient(logits: Tensor, sampler: Tensor, reference: Tensor, kind: str) -> Tensor:
    """The mean, over tokens that `sampler` draws, of the gradient of the estimate; exactly."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    ratios = (logprobs - sampler).exp()
    estimates = divergences(logprobs, reference, ratios, kind)
    (sampler.exp() * estimates).sum().backward()
    return logits.grad


def test_divergences_have_the_gradients_that_the_settings_name() -> None:
    generator = torch.Generator().manual_seed(0)
    three = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    logits, reference, other = three[0], three[1].log_softmax(-1), three[2].log_softmax(-1)
    here = logits.log_softmax(-1)

    def gradient_of(of_model: bool) -> Tensor:
        own = logits.clone().requires_grad_()
        found = own.log_softmax(-1)
        if of_model:
            (found.exp() * (found - reference)).sum().backward()
        else:
            (reference.exp() * (reference - found)).sum().backward()
        return own.grad

    to_reference, from_reference = gradient_of(True), gradient_of(False)
    for kind in ("k2", "k3"):
        assert torch.allclose(expected_gradient(logits, here, reference, kind), to_reference)
    # k3 also where other weights drew the tokens
    assert torch.allclose(expected_gradient(logits, other, reference, "k3"), to_reference)
    assert torch.allclose(expected_gradient(logits, here, reference, "k3_plain"), from_reference)
    assert not torch.allclose(to_reference, from_reference, rtol=0.1)


def test_corrections_are_cut_at_the_bound() -> None:
    old, sampled = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-2.0, -1.9, -1.0])

    def corrections(**settings: object) -> list[float]:
        return corrections_of(old, sampled, torch.tensor([3]), GrpoConfig(**settings)).tolist()

    assert corrections() == [1, 1, 1]
    assert corrections(importance="token") == pytest.approx([2.0, math.exp(-0.1), 1.0])
    whole = math.exp(0.9)
    assert corrections(importance="sequence", importance_bound=3.0) == pytest.approx([whole] * 3)
    assert corrections(importance="sequence") == pytest.approx([2.0] * 3)
    assert corrections(importance="masked", importance_bound=3.0) == [1, 1, 1]
    assert corrections(importance="masked") == [0, 0, 0]
    other_way = corrections_of(sampled, old, torch.tensor([3]), GrpoConfig(importance="masked"))
    assert other_way.tolist() == [0, 0, 0]
    nothing = torch.zeros(0)
    none = corrections_of(nothing, nothing, nothing.long(), GrpoConfig(importance="sequence"))
    assert none.tolist() == [], "a rank without completions"
    apart = corrections_of(old, sampled, torch.tensor([2, 1]), GrpoConfig(importance="masked"))
    assert apart.tolist() == [0, 0, 1], "each completion has a weight of its own"


def test_sums_count_trained_tokens_alone() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, -100, 4])
    scaled = (logits / 0.5).log_softmax(-1)
    own = scaled[[0, 2], [1, 4]]
    columns = {
        "labels": labels,
        "advantages": torch.tensor([1.0, 0.0, -2.0]),
        "old_logprobs": torch.tensor([own[0].item(), 0.0, own[1].item() - 0.7]),
        "corrections": torch.tensor([0.5, 0.0, 1.0]),
        "shares": torch.tensor([1.0, 0.0, 0.25]),
        "reference_logprobs": torch.tensor([own[0].item(), 0.0, own[1].item() + 0.1]),
    }
    settings = GrpoConfig(beta=0.1, kl="k2")
    found = grpo_sums(logits, columns, settings, temperature=0.5)
    losses = [-0.5, 2 * math.exp(0.7) + 0.1 * 0.005]
    assert found["loss"].item() == pytest.approx(losses[0] + losses[1] * 0.25, rel=1e-5)
    assert found["divergence"].item() == pytest.approx(0.005, rel=1e-4)
    entropies = -(scaled.exp() * scaled).sum(-1)
    assert found["entropy"].item() == pytest.approx((entropies[0] + entropies[2]).item())
    assert found["clipped"].item() == 0
