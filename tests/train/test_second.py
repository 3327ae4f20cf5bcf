"""A second model learns as it would alone, and a step that is not finite for it counts for both."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from lacuna.config import Config
from lacuna.model.loss import Columns, Sums, TokenLoss
from lacuna.objective.critic import SecondModel
from lacuna.objective.language_modelling import cross_entropy
from lacuna.parallel.processes import Process
from lacuna.train.optimizer import build_optimizer, update
from lacuna.train.second import Learner, open_learner
from lacuna.train.step import accumulate_gradients
from policies import batch_of, one_rank, policy_of
from tiny import random_model, tiny_config

SETTINGS = Config(optimizer={"lr": 0.01}, training={"skip_nan_inf": True})
BATCHES = [batch_of([([5, 6], [7, 8, 9])]), batch_of([([3], [4, 2])])]
DIVISOR = torch.tensor(5.0, dtype=torch.float64)


def learner(
    loss: Callable[[Tensor, Columns], Sums], rate: float = 0.5, config: Config = SETTINGS
) -> Learner:
    built = policy_of(random_model(tiny_config("llama")), config)
    second = SecondModel("critic", built, TokenLoss(loss), rate)
    return open_learner(second, config.optimizer, None, Process())


def first(norm: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([1.0], dtype=torch.float64), torch.tensor(norm), torch.tensor(0.0)


def test_it_learns_as_it_would_alone() -> None:
    with one_rank():
        second = learner(cross_entropy)
        alone = policy_of(deepcopy(second.model.built.model), SETTINGS)
        optimizer = build_optimizer(alone.model, SETTINGS.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 0.002
        for _ in range(3):
            sums, norm, skip = second.train(BATCHES, DIVISOR, 0.004, first())
            wanted = accumulate_gradients(alone, BATCHES, TokenLoss(cross_entropy), DIVISOR)
            own_norm, _ = update(alone, optimizer, DIVISOR)
            assert sums.tolist() == [1.0, wanted.item(), pytest.approx(own_norm.item())]
            assert (norm.item(), skip.item()) == (2.0, 0.0)
    assert second.names == ("critic_loss", "critic_norm")
    pairs = zip(second.model.built.model.parameters(), alone.model.parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)


def test_what_is_not_finite_for_it_counts_for_both() -> None:
    with one_rank():
        second = learner(lambda logits, columns: {"loss": logits.sum() * torch.nan})
        before = deepcopy([*second.model.built.model.parameters()])
        _, norm, skip = second.train(BATCHES, DIVISOR, 0.004, first())
    assert norm.isnan() and skip.item() == 1
    pairs = zip(second.model.built.model.parameters(), before, strict=True)
    assert all(torch.equal(own, other) for own, other in pairs), "the step was skipped"


def test_groups_of_parameters_are_its_own_too(caplog: pytest.LogCaptureFixture) -> None:
    tables = [
        {"pattern": "embed_tokens.weight", "lr_ratio": 0.0, "weight_decay": 0.0},
        {"pattern": "lora_a", "lr_ratio": 3.0},
        {"pattern": "norm.weight", "lr_ratio": 2.0},
    ]
    config = Config(optimizer={"lr": 0.01, "groups": tables})
    caplog.set_level("INFO", logger="lacuna")
    with one_rank():
        second = learner(cross_entropy, config=config)
        before = deepcopy(dict(second.model.built.model.named_parameters()))
        second.train(BATCHES, DIVISOR, 0.01, first())
    assert "'lora_a' of optimizer.groups matches nothing of the critic" in caplog.text
    moved = {
        name: (parameter - before[name]).abs().max().item()
        for name, parameter in second.model.built.model.named_parameters()
    }
    assert moved["model.embed_tokens.weight"] == 0
    # AdamW's first step is as large as the learning rate.
    assert moved["model.norm.weight"] == pytest.approx(0.01, rel=1e-3)
