"""Advantages are those of the paper, by hand and by a loop; losses are clipped as it says."""

import math

import pytest
import torch
import torch.distributed as dist

from lacuna.config.reinforcement import PpoConfig
from lacuna.objective.ppo import whitened
from lacuna.objective.ppo_losses import (
    advantages_and_returns,
    next_coefficient,
    ppo_sums,
    token_rewards,
    value_sums,
)
from policies import one_rank
from tiny import run_ranks


def test_advantages_by_hand() -> None:
    # δ = (0 + 0.5·2 - 1, 1 + 0.5·3 - 2, 4 - 3) = (0, 0.5, 1); with γλ = 0.25 from the end on:
    # 1, 0.5 + 0.25 = 0.75, 0.1875.
    rewards, values = torch.tensor([[0.0, 1.0, 4.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    advantages, returns = advantages_and_returns(rewards, values, gamma=0.5, decay=0.5)
    assert advantages.tolist() == [[0.1875, 0.75, 1.0]]
    assert returns.tolist() == [[1.1875, 2.75, 4.0]]


def slow_advantages(rewards: list[float], values: list[float], gamma: float, decay: float):
    """The sum of the definition, term by term."""
    following = [*values[1:], 0.0]
    found = []
    for start in range(len(rewards)):
        terms = [
            (gamma * decay) ** (place - start)
            * (rewards[place] + gamma * following[place] - values[place])
            for place in range(start, len(rewards))
        ]
        found.append(sum(terms))
    return found


@pytest.mark.parametrize(("gamma", "decay"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_by_a_loop_whatever_is_beside_them(gamma: float, decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 1, 9)
    rewards, values = torch.zeros(3, 9).double(), torch.zeros(3, 9).double()
    for row, length in enumerate(lengths):
        rewards[row, :length] = torch.randn(length, generator=generator)
        values[row, :length] = torch.randn(length, generator=generator)
    advantages, returns = advantages_and_returns(rewards, values, gamma, decay)
    for row, length in enumerate(lengths):
        own = (rewards[row, :length].tolist(), values[row, :length].tolist())
        wanted = slow_advantages(*own, gamma, decay)
        assert advantages[row, :length].tolist() == pytest.approx(wanted)
        assert returns[row, :length].tolist() == pytest.approx(
            [*map(sum, zip(wanted, own[1], strict=True))]
        )
    if decay == gamma == 1:
        assert returns[:, 0].tolist() == pytest.approx(rewards.sum(1).tolist())


def test_the_last_token_earns_and_each_pays_for_its_divergence() -> None:
    apart = torch.tensor([[0.5, -1.0, 2.0], [-2.0, 1.0, 0.0]])
    lengths = torch.tensor([3, 2])
    ended = torch.tensor([False, True])
    worth = torch.tensor([3.0, -3.0])
    plain = token_rewards(worth, ended, lengths, apart, 0.1, PpoConfig())
    assert plain.flatten().tolist() == pytest.approx([-0.05, 0.1, 2.8, 0.2, -3.1, 0.0])
    settings = PpoConfig(reward_clip=1.0, unended_penalty=0.25)
    bounded = token_rewards(worth, ended, lengths, apart, 0.0, settings)
    assert bounded.tolist() == [[0.0, 0.0, 0.75], [0.0, -1.0, 0.0]]


def test_the_penalty_follows_its_target() -> None:
    assert next_coefficient(0.5, divergence=6.0, target=6.0) == 0.5
    assert next_coefficient(0.5, divergence=6.6, target=6.0) == pytest.approx(0.5 * 1.01)
    assert next_coefficient(0.5, divergence=60.0, target=6.0) == pytest.approx(0.5 * 1.02)
    assert next_coefficient(0.5, divergence=-1.0, target=6.0) == pytest.approx(0.5 * 0.98)


LOGITS = torch.tensor([[0.3, -0.2, 1.0], [0.0, 0.5, -0.5], [2.0, 0.0, 0.0], [0.1, 0.1, 0.1]])
LABELS = torch.tensor([2, 1, 0, -100])
OLD_RATIOS = torch.tensor([1.5, 0.7, 1.1])
"""What the probability of each trained token now is, beside what it was."""


def test_the_policy_is_clipped_where_that_is_the_worse_one() -> None:
    temperature, epsilon = 0.8, 0.2
    logprobs = (LOGITS / temperature).log_softmax(-1)[range(3), LABELS[:3]]
    for signs in ((1, 1, 1), (-1, -1, -1)):
        advantages = torch.tensor([0.5, 2.0, 1.0]) * torch.tensor(signs)
        columns = {
            "labels": LABELS,
            "advantages": torch.cat([advantages, torch.zeros(1)]),
            "old_logprobs": torch.cat([logprobs - OLD_RATIOS.log(), torch.zeros(1)]),
            "corrections": torch.ones(4),
        }
        found = ppo_sums(LOGITS, columns, PpoConfig(epsilon=epsilon), temperature)
        corrected = columns | {"corrections": torch.tensor([2.0, 2.0, 2.0, 0.0])}
        twice = ppo_sums(LOGITS, corrected, PpoConfig(epsilon=epsilon), temperature)
        assert twice["loss"].item() == pytest.approx(2 * found["loss"].item())
        assert all(twice[name] == found[name] for name in ("entropy", "clipped", "moved"))
        wanted = 0.0
        clipped = 0
        for ratio, advantage in zip(OLD_RATIOS.tolist(), advantages.tolist(), strict=True):
            held = min(max(ratio, 1 - epsilon), 1 + epsilon)
            wanted -= min(ratio * advantage, held * advantage)
            clipped += held * advantage < ratio * advantage
        assert found["loss"].item() == pytest.approx(wanted, rel=1e-5)
        assert found["clipped"].item() == clipped == 1
        moved = sum(ratio - 1 - math.log(ratio) for ratio in OLD_RATIOS.tolist())
        assert found["moved"].item() == pytest.approx(moved, rel=1e-4)


def test_a_bad_token_that_became_much_likelier_has_a_bounded_loss_and_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = LOGITS.log_softmax(-1)[range(3), LABELS[:3]]
    advantages = torch.tensor([-0.5, 2.0, -1.0])
    columns = {
        "labels": LABELS,
        "advantages": torch.cat([advantages, torch.zeros(1)]),
        "old_logprobs": torch.cat(
            [logprobs - torch.tensor([math.exp(17), 1.0, 2.0]).log(), logprobs[:1]]
        ),
        "corrections": torch.ones(4),
    }
    found = ppo_sums(logits, columns, PpoConfig(), 1.0)
    assert found["loss"].item() == pytest.approx(0.5 * 3 - 2 + 2, rel=1e-5)
    assert found["clipped"].item() == 1
    found["loss"].backward()
    assert logits.grad[0].abs().max() == 0
    assert logits.grad[1].abs().max() > 0
    unbounded = ppo_sums(LOGITS, columns, PpoConfig(dual_clip=1e30), 1.0)
    assert unbounded["loss"].item() == pytest.approx(0.5 * math.exp(17), rel=1e-5)


def test_the_critic_is_clipped_where_that_is_the_worse_one() -> None:
    values = torch.tensor([1.0, -0.5, 0.1, 9.0], requires_grad=True)
    old = torch.tensor([0.5, 0.0, 0.0, 0.0])
    returns = torch.tensor([2.0, 1.0, 0.3, 0.0])
    columns = {"labels": LABELS, "values": old, "returns": returns}
    found = value_sums(values[:, None], columns, PpoConfig(value_epsilon=0.2))
    # Held at 0.7, -0.2 and 0.1: the first is further from its return so, the second nearer.
    wanted = ((0.7 - 2) ** 2 + (-0.5 - 1) ** 2 + (0.1 - 0.3) ** 2) / 2
    assert found["loss"].item() == pytest.approx(wanted, rel=1e-6)
    assert found["clipped"].item() == 1
    found["loss"].backward()
    assert values.grad.tolist() == pytest.approx([0.0, -1.5, -0.2, 0.0])


def test_values_within_the_bound_are_never_clipped() -> None:
    torch.manual_seed(0)
    old, values, returns = 0.1 * torch.rand(3, 1000)
    columns = {"labels": torch.ones(1000).long(), "values": old, "returns": returns}
    assert value_sums(values[:, None], columns, PpoConfig(value_epsilon=0.2))["clipped"] == 0


def test_advantages_are_whitened_over_all_ranks() -> None:
    values = torch.tensor([3.0, -1.0, 4.0, 1.0, 5.0]).double()
    wanted = (values - values.mean()) / values.std(correction=0)
    with one_rank():
        assert torch.allclose(whitened(values), wanted)
        assert whitened(values[:0]).tolist() == []
        assert whitened(values[:1]).tolist() == [0.0]
    first, second = run_ranks(2, own_part_whitened, values)
    assert torch.allclose(torch.cat([first, second]), wanted)


def own_part_whitened(values: torch.Tensor) -> torch.Tensor:
    """Rank 0 has four of the values, rank 1 one."""
    return whitened(values[4:] if dist.get_rank() else values[:4])
