"""Tokens travel to the ranks of their experts once each, and come back as weighted sums."""

import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.parallel.permutation import Order, copied_rows, summed_rows
from lacuna.parallel.token_exchange import send_and_compute
from tiny import relative_error, run_ranks

EXPERTS = 6
WIDTH = 3
CHOICES = 3


def inputs_of(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the numbers of the experts that are chosen, and their weights."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if rank == 0:
        scores[:, : EXPERTS // 2] += 1  # all of its choices are its own
    weights, chosen = scores.topk(CHOICES)
    return hidden.requires_grad_(), chosen, weights.requires_grad_()


def with_gradients(made: Tensor, hidden: Tensor, weights: Tensor, matrices: Tensor) -> list[Tensor]:
    made.square().sum().backward()
    gradients = [one.grad for one in (hidden, weights, matrices)]
    return [made.detach(), *(one for one in gradients if one is not None)]


def exchanged(tokens: list[int]) -> tuple[list[int], list[Tensor]]:
    """The numbers of tokens and choices that a rank is given, and what comes back to it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = EXPERTS // ranks
    matrices = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))
    matrices = matrices.split(own)[rank].clone().requires_grad_()
    given: list[int] = []

    def compute(rows: Tensor, where: Order, numbers: Tensor, weights: Tensor) -> Tensor:
        assert numbers.tolist() == sorted(numbers.tolist())
        given.extend((len(rows), len(numbers)))
        scales = copied_rows(weights.flatten(), where.of_each())
        outputs = (copied_rows(rows, where)[:, None] @ matrices[numbers])[:, 0]
        return summed_rows(outputs * scales[:, None], where)

    hidden, chosen, weights = inputs_of(rank, tokens[rank])
    made = send_and_compute(compute, dist.group.WORLD, own, hidden, chosen, weights)
    return given, with_gradients(made, hidden, weights, matrices)


def alone(tokens: list[int]) -> tuple[list[list[Tensor]], Tensor]:
    """What each rank's tokens become with all experts here, and the gradient of these."""
    matrices = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))
    matrices.requires_grad_()
    found = []
    for rank, count in enumerate(tokens):
        hidden, chosen, weights = inputs_of(rank, count)
        made = (hidden[:, None, None] @ matrices[chosen])[:, :, 0] * weights[..., None]
        found.append(with_gradients(made.sum(1), hidden, weights, matrices)[:3])
    assert matrices.grad is not None
    return found, matrices.grad


def test_each_token_is_sent_once_to_a_rank_and_comes_back_weighted() -> None:
    tokens = [7, 4]
    expected, gradient = alone(tokens)
    found = run_ranks(2, exchanged, tokens)
    for (_, ours), theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=False):
            assert relative_error({"": one}, {"": other}) < 1e-6
    assert relative_error({"": torch.cat([ours[3] for _, ours in found])}, {"": gradient}) < 1e-6
    chosen = torch.cat([inputs_of(rank, count)[1] for rank, count in enumerate(tokens)])
    for rank, (given, _) in enumerate(found):
        here = chosen // (EXPERTS // 2) == rank
        assert given == [here.any(1).sum(), here.sum()]
    assert found[1][0][0] < sum(tokens)  # all of the first rank's tokens stayed there
    assert found[0][0][0] < found[0][0][1]


def test_a_rank_without_tokens_computes_with_one_of_zeros() -> None:
    tokens = [5, 0]
    expected, gradient = alone(tokens)
    (_, first), (given, second) = run_ranks(2, exchanged, tokens)
    assert relative_error({"": first[0]}, {"": expected[0][0]}) < 1e-6
    assert given == [1, CHOICES]
    assert second[0].shape == (0, WIDTH)
    assert relative_error({"": torch.cat([first[3], second[3]])}, {"": gradient}) < 1e-6
