"""Tokens travel to the ranks that have their experts, and what these make of them travels back.

A token is sent once to a rank, however many of its experts are there.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)

from lacuna.parallel.permutation import Order, copied_rows, order_of_some, summed_rows


class _Sizes(NamedTuple):
    """How many tokens go to and come from each rank, and how many experts these have here."""

    outgoing: list[int]
    incoming: list[int]
    choices: int


def send_and_compute(
    compute: Callable[[Tensor, Order, Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
    own: int,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """The weighted sum of the chosen experts' outputs, [tokens, width] as `hidden`.

    `chosen` and `weights` are [tokens, k]: the numbers of each token's experts among those of all
    ranks, of which each has `own`, and how they are weighted. `compute` is given the tokens that
    this rank is sent, the order of their choices by expert, the numbers of these experts among its
    own, and weights [tokens, k]; it returns the weighted sums of its own experts' outputs.
    """
    ranks = torch.arange(group.size(), device=chosen.device)
    # Of each token at each rank, [tokens, ranks, k]: the numbers of its experts among those there.
    numbers = chosen[:, None] - own * ranks[:, None]
    numbers = torch.where((numbers >= 0) & (numbers < own), numbers, own).int()
    choices = (numbers < own).sum(2)
    is_sent = choices > 0
    sent = torch.stack([is_sent.sum(0), choices.sum(0)], 1)
    received = all_to_all_single(sent, None, None, group)
    # Copy `token * ranks + rank` goes to that rank. What is sent nowhere comes last.
    order = torch.where(is_sent, ranks, len(ranks)).flatten().argsort(stable=True)
    where = order_of_some(order, is_sent)
    numbers = numbers.flatten(0, 1)[order]
    sizes = _read(sent, received)  # waits: all that need not know sizes comes before

    copies = sum(sizes.outgoing)
    where = where.of_those_present(copies)
    tokens = _send(copied_rows(hidden, where), sizes, group)
    scales = _send(copied_rows(weights, where), sizes, group)
    numbers = all_to_all_single(numbers[:copies], sizes.incoming, sizes.outgoing, group)
    outputs = _compute_by_expert(compute, own, tokens, numbers, scales, sizes.choices)
    back = all_to_all_single_autograd(outputs, sizes.outgoing, sizes.incoming, group)
    # Recomputation ends before the next line, and what nobody waits for is never freed.
    wait_tensor(back.detach())
    return summed_rows(back, where)


def _read(sent: Tensor, received: Tensor) -> _Sizes:
    """Reads the counts of tokens and choices, [ranks, 2] each, for which the host must wait."""
    to_ranks, from_ranks = torch.stack([sent, received]).tolist()
    return _Sizes(
        [tokens for tokens, _ in to_ranks],
        [tokens for tokens, _ in from_ranks],
        sum(choices for _, choices in from_ranks),
    )


def _send(copies: Tensor, sizes: _Sizes, group: dist.ProcessGroup) -> Tensor:
    return all_to_all_single_autograd(copies, sizes.incoming, sizes.outgoing, group)


def _compute_by_expert(
    compute: Callable[[Tensor, Order, Tensor, Tensor], Tensor],
    own: int,
    tokens: Tensor,
    numbers: Tensor,
    weights: Tensor,
    choices: int,
) -> Tensor:
    """What `compute` makes of tokens, of whose `numbers` [tokens, k] as many as `choices` are own.

    These are below `own`, and all others are `own`.
    """
    count = len(tokens)
    if count == 0:
        # One of zeros, weighted by zero, so that this rank has gradients to exchange as others do.
        tokens, numbers, weights = (F.pad(one, (0, 0, 0, 1)) for one in (tokens, numbers, weights))
        choices = numbers.numel()
    by_expert, order = numbers.flatten().sort(stable=True)
    where = order_of_some(order, numbers < own).of_those_present(choices)
    return compute(tokens, where, by_expert[:choices], weights)[:count].contiguous()
