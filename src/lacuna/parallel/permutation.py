"""Rows in another order: those of tokens by their experts or ranks, and back.

Each row has a known number of copies at most, so that gradients are taken by the inverse order as
well. What torch does for rows taken by any indices sorts these, and adds rows one after the other.
Rows may also be set apart, among others that are zero, and taken from there.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Order(NamedTuple):
    """Where the copies of each row of [rows, ...] are among all copies [copies, ...].

    Attributes:
        order: the number of the copy at each place: copy n is of row n // times.
        places: where the copies of each row are, [rows, times].
        present: which of these there are, [rows, times]; None if all are.
    """

    order: Tensor
    places: Tensor
    present: Tensor | None

    def of_each(self) -> "Order":
        """The same order for rows that are the copies."""
        present = None if self.present is None else self.present.flatten()[:, None]
        return Order(self.order, self.places.flatten()[:, None], present)

    def of_those_present(self, count: int) -> "Order":
        """The same order without the copies that are not there; `count` says how many are."""
        return self._replace(order=self.order[:count])


def order_of(order: Tensor, times: int) -> Order:
    """The order of copies with these numbers, int64, of which each row has as many as `times`."""
    return Order(order, _places_in(order).view(-1, times), None)


def order_of_some(order: Tensor, present: Tensor) -> Order:
    """The order of copies with these numbers, int64, of which not all are `present` [rows, times].

    Those that are not come last. They are part of it until `of_those_present` leaves them out.
    """
    places = _places_in(order).view_as(present)
    return Order(order, places.masked_fill(~present, 0), present)


def _places_in(order: Tensor) -> Tensor:
    """The place of each number."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def copied_rows(rows: Tensor, where: Order) -> Tensor:
    """The copies [copies, ...] of rows [rows, ...], at their places."""
    copies: Tensor = _Copied.apply(rows, *_indices(where))  # type: ignore[no-untyped-call]
    return copies


def summed_rows(copies: Tensor, where: Order) -> Tensor:
    """The sum [rows, ...] of the copies of each row, which are [copies, ...] at their places."""
    rows: Tensor = _Summed.apply(copies, *_indices(where))  # type: ignore[no-untyped-call]
    return rows


def set_apart(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """The rows [rows, ...] at these places, no two at one, of [count, ...] that else are zero."""
    # Not in place: within functions like those below torch 2.11 compiles that without a gradient.
    return rows.new_zeros(count, *rows.shape[1:]).index_copy(0, places, rows)


def taken_from(apart: Tensor, places: Tensor) -> Tensor:
    """The rows at these places, no two at one."""
    rows: Tensor = _TakenFrom.apply(apart, places)  # type: ignore[no-untyped-call]
    return rows


def _indices(where: Order) -> tuple[Tensor, Tensor, Tensor | None]:
    """The row whose copy is at each place, the places of the copies of each row, and which are."""
    times = where.places.shape[1]
    origins = where.order if times == 1 else where.order // times
    return origins, where.places, where.present


# Indices are all that the following are given: compilers fail on a number that they do not know.
class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, origins: Tensor, places: Tensor, present: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(places, present)
        return rows[origins]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(gradients[0], *ctx.saved_tensors), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, copies: Tensor, origins: Tensor, places: Tensor, present: Tensor | None
    ) -> Tensor:
        # Saved for the backward pass, it would have recomputation go on until here.
        ctx.origins = origins
        return _summed(copies, places, present)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0][ctx.origins], None, None, None


class _TakenFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, apart: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(apart)
        return apart[places]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return set_apart(gradients[0], ctx.saved_tensors[0], ctx.count), None


def _summed(copies: Tensor, places: Tensor, present: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():
        return _added(copies, places, present)
    if places.shape[1] == 1 and present is None:
        return copies[places[:, 0]]
    # One pass that adds in float32, whatever the dtype.
    weights = None if present is None else present.to(copies.dtype)
    rows = F.embedding_bag(
        places, copies.unsqueeze(-1).flatten(1), mode="sum", per_sample_weights=weights
    )
    return rows.view(len(places), *copies.shape[1:])


def _added(copies: Tensor, places: Tensor, present: Tensor | None) -> Tensor:
    """The same for compilers, which make one pass over the copies of this.

    What they make of a sum over the few copies of each row reads these far more slowly.
    """
    dtype = torch.promote_types(copies.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=copies.device)
    for number, place in enumerate(places.unbind(1)):
        taken = copies[place].to(dtype)
        if present is not None:
            there = present[:, number]
            taken = torch.where(there.view(-1, *(1,) * (taken.ndim - 1)), taken, 0)
        total = total + taken
    return total.to(copies.dtype)
