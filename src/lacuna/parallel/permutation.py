"""Rows in another order: those of tokens by their experts, and back.

Each row is taken a known number of times, so that gradients are taken by the inverse order as well.
What torch does for rows taken by any indices sorts these, and adds rows one after the other.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Order(NamedTuple):
    """Where the copies of each row of [rows, ...] are among all copies [rows * times, ...].

    Attributes:
        order: the number of the copy at each place: copy n is of row n // times.
        places: where the copies of each row are, [rows, times].
    """

    order: Tensor
    places: Tensor

    def of_each(self) -> "Order":
        """The same order for rows that are the copies."""
        return Order(self.order, self.places.flatten()[:, None])


def order_of(order: Tensor, times: int) -> Order:
    """The order with copies of these numbers, int64, at their places."""
    numbers = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, numbers)
    return Order(order, places.view(len(order) // times, times))


def copied_rows(rows: Tensor, where: Order) -> Tensor:
    """The copies [rows * times, ...] of rows [rows, ...], at their places."""
    copies: Tensor = _Copied.apply(rows, *_indices(where))  # type: ignore[no-untyped-call]
    return copies


def summed_rows(copies: Tensor, where: Order) -> Tensor:
    """The sum [rows, ...] of the copies of each row, which are [rows * times, ...] at places."""
    rows: Tensor = _Summed.apply(copies, *_indices(where))  # type: ignore[no-untyped-call]
    return rows


def _indices(where: Order) -> tuple[Tensor, Tensor]:
    """The row whose copy is at each place, and the places of the copies of each row."""
    times = where.places.shape[1]
    return where.order if times == 1 else where.order // times, where.places


# Indices are all that the following are given: compilers fail on a number that they do not know.
class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, origins: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows[origins]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        [places] = ctx.saved_tensors
        return _summed(gradients[0], places), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, origins: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(origins)
        return _summed(copies, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        [origins] = ctx.saved_tensors
        return gradients[0][origins], None, None


def _summed(copies: Tensor, places: Tensor) -> Tensor:
    # torch adds in float32, whatever the dtype.
    return copies[places[:, 0]] if places.shape[1] == 1 else copies[places].sum(1)
