"""Rows in another order: those of tokens by their experts, and back.

Each row is taken a known number of times, so that gradients are taken by the inverse order as well.
What torch does for rows taken by any indices sorts these, and adds rows one after the other.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Order(NamedTuple):
    """Where `times` copies of each row of [rows, ...] are among all copies.

    Attributes:
        order: the number of the copy at each place, [rows * times]: copy n is of row n // times.
        inverse: the place of each copy.
        times: how many copies there are of each row.
    """

    order: Tensor
    inverse: Tensor
    times: int


def order_of(order: Tensor, times: int) -> Order:
    """The order with copies of these numbers, int64, at their places."""
    places = torch.arange(len(order), device=order.device)
    return Order(order, torch.empty_like(order).scatter_(0, order, places), times)


def copied_rows(rows: Tensor, where: Order) -> Tensor:
    """The copies [rows * times, ...] of rows [rows, ...], at their places."""
    copies: Tensor = _Copied.apply(rows, *where)  # type: ignore[no-untyped-call]
    return copies


def summed_rows(copies: Tensor, where: Order) -> Tensor:
    """The sum [rows, ...] of the copies of each row, which are [rows * times, ...] at places."""
    rows: Tensor = _Summed.apply(copies, *where)  # type: ignore[no-untyped-call]
    return rows


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.count = count
        return _copied(rows, order, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        [inverse] = ctx.saved_tensors
        return _summed(gradients[0], inverse, ctx.count), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, order: Tensor, inverse: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.count = count
        return _summed(copies, inverse, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        [order] = ctx.saved_tensors
        return _copied(gradients[0], order, ctx.count), None, None, None


def _copied(rows: Tensor, order: Tensor, count: int) -> Tensor:
    return rows[order if count == 1 else order // count]


def _summed(copies: Tensor, inverse: Tensor, count: int) -> Tensor:
    by_row = copies[inverse]
    if count == 1:
        return by_row
    # torch adds in float32, whatever the dtype.
    return by_row.view(len(inverse) // count, count, *copies.shape[1:]).sum(1)
