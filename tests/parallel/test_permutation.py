"""Rows in the order of their experts, and sums of them, are those of indices; so are gradients."""

import pytest
import torch
from torch import Tensor

from lacuna.parallel.permutation import Order, copied_rows, order_of, summed_rows


def by_indices(rows: Tensor, where: Order) -> Tensor:
    return rows[where.order // where.places.shape[1]]


def summed_by_indices(copies: Tensor, where: Order) -> Tensor:
    rows: Tensor = copies[where.order.argsort()].unflatten(0, (-1, where.places.shape[1])).sum(1)
    return rows


def with_gradient(function: object, rows: Tensor, where: Order) -> tuple[Tensor, Tensor]:
    rows = rows.detach().clone().requires_grad_()
    made = function(rows, where)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(2)
    made.backward(torch.randn(made.shape, generator=generator).to(made.dtype))
    assert rows.grad is not None
    return made, rows.grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_and_gradients_are_those_of_indices(count: int, compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    for tokens in (20, 7):
        where = order_of(torch.randint(4, (tokens * count,)).argsort(stable=True), count)
        for ours, theirs, number in (
            (copied_rows, by_indices, tokens),
            (summed_rows, summed_by_indices, tokens * count),
        ):
            rows = torch.randn(number, 5)
            function = torch.compile(ours, fullgraph=True, dynamic=True) if compiled else ours
            found = with_gradient(function, rows, where)
            torch.testing.assert_close(found, with_gradient(theirs, rows, where))


def test_gradients_of_bfloat16_are_added_in_float32() -> None:
    where = order_of(torch.arange(300), 300)
    rows = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    copied_rows(rows, where).backward(torch.ones(300, 2, dtype=torch.bfloat16))
    assert rows.grad is not None
    assert rows.grad.tolist() == [[300, 300]]  # added in bfloat16, ones would end at 256
