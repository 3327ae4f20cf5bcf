"""What PPO computes: rewards of tokens, advantages, and the losses of policy and critic."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lacuna.config.reinforcement import PpoConfig
from lacuna.data.packing import IGNORED
from lacuna.model.loss import Columns, Sums, logprobs_of
from lacuna.objective.grpo_losses import dual_clipped

NAMES = ("loss", "entropy", "clipped", "moved")
VALUE_NAMES = ("loss", "clipped")
# How far the penalty may change at a time, and by what share of the relative error (arXiv
# 1909.08593, section 2.2).
_LARGEST_ERROR = 0.2
_GAIN = 0.1


def token_rewards(
    worth: Tensor,
    ended: Tensor,
    lengths: Tensor,
    divergences: Tensor,
    coefficient: float,
    settings: PpoConfig,
) -> Tensor:
    """The rewards of tokens, [completions, tokens] (arXiv 2203.02155, section 3.5).

    Each pays for its part of the divergence from the reference, an estimate [completions, tokens]
    by log-probabilities. The last of a completion, by the `lengths` [completions], earns what that
    is `worth` [completions], which is less where it has not `ended`, bool [completions].
    """
    if settings.reward_clip is not None:
        worth = worth.clamp(-settings.reward_clip, settings.reward_clip)
    worth = torch.where(ended, worth, worth - settings.unended_penalty)
    rewards = -coefficient * divergences
    rewards[torch.arange(len(rewards)), lengths - 1] += worth
    return rewards


def advantages_and_returns(
    rewards: Tensor, values: Tensor, gamma: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantages, and the returns that the critic learns, [completions, tokens].

    They are made of the `rewards` of tokens and the `values`, which the critic expects before each
    token. Both are [completions, tokens], and 0 after the end of a completion, where nothing is
    expected (arXiv 1506.02438, equation 16; `decay` is its lambda).
    """
    surprises = rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values
    advantages = torch.zeros_like(values)
    ahead = torch.zeros_like(values[:, 0])
    for place in reversed(range(values.shape[1])):
        ahead = surprises[:, place] + gamma * decay * ahead
        advantages[:, place] = ahead
    return advantages, advantages + values


def next_coefficient(coefficient: float, divergence: float, target: float) -> float:
    """The weight of the divergence for the next completions.

    It grows where the `divergence` of completions, in nats, was beyond the target, and else falls.
    """
    error = max(-_LARGEST_ERROR, min(divergence / target - 1, _LARGEST_ERROR))
    return coefficient * (1 + _GAIN * error)


def ppo_sums(logits: Tensor, columns: Columns, settings: PpoConfig, temperature: float) -> Sums:
    """The clipped loss (arXiv 1707.06347, equation 7; dual clip), and what is told, over tokens.

    The columns are `labels`, `advantages`, `old_logprobs`, before the first step on these
    completions, and `corrections`, for a sampler that differs. `moved` is the divergence of the
    policy from what it then was, by the estimate k3.
    """
    labels = columns["labels"]
    logits = logits / temperature
    log_ratios = logprobs_of(logits, labels) - columns["old_logprobs"]
    ratios = log_ratios.exp()
    advantages = columns["advantages"]
    clipped = ratios.clamp(1 - settings.epsilon, 1 + settings.epsilon)
    losses = torch.maximum(-ratios * advantages, -clipped * advantages)
    losses = dual_clipped(losses, advantages, settings.dual_clip)
    trained = (labels != IGNORED).float()
    found = logits.detach().log_softmax(-1)
    entropy = -(found.exp() * found).sum(-1)
    is_clipped = losses != -ratios * advantages
    return {
        "loss": (losses * columns["corrections"]).sum(),
        "entropy": (entropy * trained).sum(),
        "clipped": is_clipped.float().sum(),
        "moved": ((ratios - 1 - log_ratios).detach() * trained).sum(),
    }


def value_sums(logits: Tensor, columns: Columns, settings: PpoConfig) -> Sums:
    """The critic's clipped loss, summed over trained tokens; its `logits` are [tokens, 1].

    Values that leave what they were by more than the bound learn only while that is the worse one.
    The columns are `labels`; `returns`; and `values`, before the first step on these completions.
    """
    trained = (columns["labels"] != IGNORED).float()
    values = logits[:, 0]
    old = columns["values"]
    bound = settings.value_epsilon
    moved = values - old
    bounded = old + moved.clamp(-bound, bound)
    free = (values - columns["returns"]).square()
    held = (bounded - columns["returns"]).square()
    # Within the bound both are the same, but for rounding.
    is_held = (moved.abs() > bound) & (held > free)
    return {
        "loss": (torch.maximum(free, held) * trained).sum() / 2,
        "clipped": (is_held * trained).sum(),
    }
