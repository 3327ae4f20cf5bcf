"""Experts balanced by force, for benchmarks alone: every expert is given as many tokens."""

import torch
from torch import Tensor, nn

from lacuna.config import UserError
from lacuna.parallel.expert_stacks import stacks_of

OPTION = "bench: --balanced-experts"


def balance_experts(model: nn.Module) -> None:
    """Has tokens choose the experts of each layer in turn, in place, whatever routers say.

    The k-th expert of token t is number (t · K + k) modulo the number of experts, on each rank by
    itself. The outputs of experts are weighted as the router weighs those that it had chosen, so
    that routers have gradients. What is trained so is another model: it is only to be timed. Raises
    `UserError` for a model that has no stacks of experts.
    """
    stacks = stacks_of([model])
    if not stacks:
        raise UserError(
            f"{OPTION}: {type(model).__name__} has no stacks of experts that transformers lets "
            "others compute with: leave it out."
        )
    for stack in stacks:
        stack.register_forward_pre_hook(_choose_in_turn, prepend=True)  # before they are counted


def _choose_in_turn(stack: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The arguments of a stack of experts: tokens, numbers of experts [tokens, k], weights."""
    hidden, chosen, weights = arguments
    experts = int(stack.num_experts)  # type: ignore[arg-type]  # it is no module
    turns = torch.arange(chosen.numel(), dtype=chosen.dtype, device=chosen.device)
    return hidden, turns.view(chosen.shape) % experts, weights
