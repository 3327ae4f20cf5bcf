"""Rows in the order of their experts, and sums of them, are those of indices; so are gradients."""

import pytest
import torch
from torch import Tensor

from lacuna.parallel.permutation import (
    Order,
    copied_rows,
    order_of,
    order_of_some,
    summed_rows,
)


def by_indices(rows: Tensor, where: Order) -> Tensor:
    return rows[where.order // where.places.shape[1]]


def summed_by_indices(copies: Tensor, where: Order) -> Tensor:
    count, times = where.places.shape
    rows = copies.new_zeros(count, *copies.shape[1:])
    return rows.index_add(0, where.order // times, copies)


def with_gradient(function: object, rows: Tensor, where: Order) -> tuple[Tensor, Tensor]:
    rows = rows.detach().clone().requires_grad_()
    made = function(rows, where)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(2)
    made.backward(torch.randn(made.shape, generator=generator).to(made.dtype))
    assert rows.grad is not None
    return made, rows.grad


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(5,), ()], ids=["rows", "numbers"])
def test_copies_that_are_not_there_add_nothing(shape: tuple[int, ...], compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    for tokens, there in ((20, 31), (7, 1)):
        order = torch.randperm(tokens * 3)
        present = torch.zeros(tokens * 3, dtype=torch.bool)
        present[order[:there]] = True
        where = order_of_some(order, present.view(tokens, 3)).of_those_present(there)
        for of in (where, where.of_each()):
            for ours, theirs, number in (
                (copied_rows, by_indices, len(of.places)),
                (summed_rows, summed_by_indices, there),
            ):
                rows = torch.randn(number, *shape)
                function = torch.compile(ours, fullgraph=True, dynamic=True) if compiled else ours
                found = with_gradient(function, rows, of)
                torch.testing.assert_close(found, with_gradient(theirs, rows, of))


def test_gradients_of_bfloat16_are_added_in_float32() -> None:
    where = order_of(torch.arange(300), 300)
    rows = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    copied_rows(rows, where).backward(torch.ones(300, 2, dtype=torch.bfloat16))
    assert rows.grad is not None
    assert rows.grad.tolist() == [[300, 300]]  # added in bfloat16, ones would end at 256


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.bfloat16]
)
def test_compiled_sums_are_as_exact_as_others(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    where = order_of(torch.randint(4, (20 * 8,)).argsort(stable=True), 8)
    copies = torch.randn(20 * 8, 5, dtype=torch.float64).to(dtype)
    compiled = torch.compile(summed_rows, fullgraph=True, dynamic=True)
    exact = summed_by_indices(copies.double(), where)
    found = compiled(copies, where)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-15)
