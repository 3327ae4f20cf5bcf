"""The losses of GRPO and its kin: pure functions of log-probabilities, rewards and settings."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lacuna.config.reinforcement import GrpoConfig, PolicyConfig
from lacuna.data.packing import IGNORED
from lacuna.model.loss import Columns, Sums, logprobs_of

NAMES = ("loss", "divergence", "entropy", "clipped")
# Keeps the advantages of groups whose rewards hardly differ finite, as in TRL.
_SMALLEST_DEVIATION = 1e-4


def advantages_of(rewards: Sequence[Sequence[float]], settings: GrpoConfig) -> Tensor:
    """How much better each completion is than the others of its group, float32 [groups, samples].

    It is the reward less the group's mean, divided by the group's standard deviation (arXiv
    2402.03300, section 4.1.2) or by nothing (Dr. GRPO, arXiv 2503.20783). A reward that is nan is
    left out of both, and its completion is neither better nor worse.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    count = values.isfinite().sum(1, keepdim=True)
    advantages = (values - values.nanmean(1, keepdim=True)).nan_to_num(0)
    scale = settings.scale or ("none" if settings.loss == "dr_grpo" else "group")
    if scale == "group":
        variance = advantages.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + _SMALLEST_DEVIATION)
    return advantages.float()


def corrections_of(old: Tensor, sampled: Tensor, counts: Tensor, settings: PolicyConfig) -> Tensor:
    """The weights of completions' tokens [tokens], by which training corrects the sampler.

    `old` are the tokens' log-probabilities as training finds them, `sampled` as generating did, and
    `counts` int64 [completions] how many tokens each completion has. Weights are cut at the bound
    (truncated importance sampling), of tokens or of the completion; masked has 1, or 0 where the
    completion's weight is beyond the bound or below its inverse.
    """
    difference = old - sampled
    bound = settings.importance_bound
    if settings.importance == "none" or not len(old):
        return torch.ones_like(old)
    if settings.importance == "token":
        return difference.exp().clamp(max=bound)
    weights = torch.segment_reduce(difference, "sum", lengths=counts).exp()
    if settings.importance == "sequence":
        weights = weights.clamp(max=bound)
    else:
        weights = ((weights <= bound) & (weights >= 1 / bound)).float()
    return weights.repeat_interleave(counts)


def policy_losses(
    ratios: Tensor, logprobs: Tensor, advantages: Tensor, settings: GrpoConfig
) -> Tensor:
    """The loss of each token [tokens] by the ratio of its new to its old probability.

    It is that of PPO with two bounds (DAPO, arXiv 2503.14476, equation 8) and a third for
    completions that are worse than the others; for cispo that of arXiv 2506.13585, equation 4,
    whose clipped ratio has no gradient.
    """
    below, above = settings.clip
    if settings.loss == "cispo":
        return -ratios.detach().clamp(max=1 + above) * advantages * logprobs
    clipped = ratios.clamp(1 - below, 1 + above)
    losses = -torch.minimum(ratios * advantages, clipped * advantages)
    return dual_clipped(losses, advantages, settings.dual_clip)


def dual_clipped(losses: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """Losses [tokens] without what ratios beyond the `bound` add (arXiv 1912.09729, equation 5).

    A token that is to become less likely and has become much likelier instead would have a loss,
    and a gradient, without bounds.
    """
    return torch.where(advantages < 0, torch.minimum(losses, -bound * advantages), losses)


def divergences(logprobs: Tensor, reference: Tensor, ratios: Tensor, kind: str) -> Tensor:
    """Estimates of the divergence from the reference at each token [tokens].

    With tokens that the model drew, the mean of k3 is KL(model, reference). The mean of its
    gradient is that of KL(reference, model), unless the ratio, which has a gradient too, weighs it.
    The mean of k2's gradient is the right one where ratios are 1.
    """
    difference = logprobs - reference
    if kind == "k2":
        return difference.square() / 2
    estimate = torch.expm1(-difference) + difference
    return estimate if kind == "k3_plain" else estimate * ratios


def grpo_sums(logits: Tensor, columns: Columns, settings: GrpoConfig, temperature: float) -> Sums:
    """The loss, and what is told of the tokens, summed over those that are trained.

    The columns are `labels`; `advantages`; `old_logprobs`, before the first step on these
    completions; `corrections`, for a sampler that differs; and `shares`, what a token counts beside
    the denominator of the loss. With a divergence there are `reference_logprobs`; with gspo
    `log_ratios`, of the completion that a token is of, as the model now finds it.
    """
    labels = columns["labels"]
    logits = logits / temperature
    logprobs = logprobs_of(logits, labels)
    advantages = columns["advantages"]
    log_ratios = logprobs - columns["old_logprobs"]
    if settings.loss == "gspo":
        # GSPO-token (arXiv 2507.18071, equation 13): each token has its part of the gradient.
        log_ratios = columns["log_ratios"] + logprobs - logprobs.detach()
    ratios = log_ratios.exp()
    losses = policy_losses(ratios, logprobs, advantages, settings) * columns["corrections"]
    trained = (labels != IGNORED).float()
    distance = torch.zeros_like(losses)
    if settings.beta:
        distance = divergences(logprobs, columns["reference_logprobs"], ratios, settings.kl)
        losses = losses + settings.beta * distance
    below, above = settings.clip
    # cispo's weight of a token is bounded whatever the sign.
    most = 1 + above if settings.loss == "cispo" else settings.dual_clip
    is_clipped = torch.where(
        advantages > 0, ratios > 1 + above, (ratios < 1 - below) | (ratios > most)
    ) & (advantages != 0)
    found = logits.detach().log_softmax(-1)
    entropy = -(found.exp() * found).sum(-1)
    return {
        "loss": (losses * columns["shares"]).sum(),
        "divergence": (distance.detach() * trained).sum(),
        "entropy": (entropy * trained).sum(),
        "clipped": (is_clipped * trained).sum(),
    }
