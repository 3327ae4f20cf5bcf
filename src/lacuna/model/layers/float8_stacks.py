"""Stacks of experts whose grouped products are in 8-bit floats, each row and column with a scale.

The casts are torchao's kernels, those of its own grouped product (`prototype.moe_training`), which
is only for groups that are padded already and stacks [experts, out, in], and has neither exact
gradients of weights nor a form for CPUs. This module is imported only where torchao is installed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8.float8_utils import to_fp8_saturated
from torchao.prototype.moe_training import kernels
from transformers.integrations.moe import _grouped_linear

from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.wrapping import Place, Wrapper, wrap
from lacuna.parallel.grouped_experts import numbers_of

_DTYPE = torch.float8_e4m3fn
_POWERS = {"round_scales_to_power_of_2": True}  # of torchao's functions, as its recipes by rows


class Float8Stacks(Wrapper):
    """Experts that cast tokens, stacks and gradients to 8-bit floats when they multiply.

    Attributes:
        in_float8: the names of the stacks that do so; others multiply as they are.
        emulate: whether products of full precision compute with float8's values.
        exact_gradients: whether gradients of weights are computed without float8.
    """

    place = Place.PRODUCT
    in_float8: tuple[str, ...]
    emulate: bool
    exact_gradients: bool

    def grouped_product(self, name: str, rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
        """Rows times the matrices of their experts, [rows, out]; those of each end at `ends`.

        The number of each expert's rows is a multiple of 16, and not 0. The `stack` is the one of
        this name, which something around this module may have changed.
        """
        by_inputs = is_transposed(self)
        product: Tensor
        if name not in self.in_float8:
            product = _grouped_linear(rows, stack, ends, is_transposed=by_inputs)
            return product
        how = _How(by_inputs, self.emulate, self.exact_gradients)
        stack = stack.contiguous()
        rows = rows.to(stack.dtype)
        product = _Product.apply(rows, stack, ends, how)  # type: ignore[no-untyped-call]
        return product


def wrap_stacks(experts: nn.Module, names: Sequence[str], recipe: str, emulate: bool) -> None:
    """Has the stacks of these names of a module be multiplied with in float8, in place.

    Each row and each column has a scale whatever the `recipe`: torch has no other grouped products.
    """
    exact = recipe == "rowwise_with_gw_hp"
    wrap(experts, Float8Stacks, in_float8=(*names,), emulate=emulate, exact_gradients=exact)


class _How(NamedTuple):
    """How a stack is stored, [experts, in, out] or not, and what else products depend on."""

    by_inputs: bool
    emulate: bool
    exact_gradients: bool


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, stack: Tensor, ends: Tensor, how: _How) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, stack, ends)
        ctx.how = how
        return _multiply(rows, stack, ends, how.by_inputs, how.emulate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, stack, ends = ctx.saved_tensors
        how = ctx.how
        gradient = gradients[0].contiguous()
        of_rows = of_stack = None
        if ctx.needs_input_grad[0]:
            of_rows = _multiply(gradient, stack, ends, not how.by_inputs, how.emulate)
        if ctx.needs_input_grad[1]:
            left, right = (rows, gradient) if how.by_inputs else (gradient, rows)
            of_stack = _sum_products(left, right, ends, how)
        return of_rows, of_stack, None, None


def _multiply(rows: Tensor, stack: Tensor, ends: Tensor, by_inputs: bool, emulate: bool) -> Tensor:
    """Rows [rows, a] times a stack [experts, a, b] `by_inputs`, or times one [experts, b, a]."""
    if emulate:
        matrices = _rounded(stack, -2) if by_inputs else _rounded(stack, -1).mT
        product: Tensor = torch.ops.transformers.grouped_mm_fallback(
            _rounded(rows, -1), matrices, ends
        )
        return product
    left, left_scales = kernels.triton_fp8_rowwise_2d_scale_and_cast(rows, _DTYPE, **_POWERS)
    # The hardware wants a column's values side by side, whichever way they are stored.
    if by_inputs:
        cast = kernels.triton_fp8_rowwise_3d_transpose_rhs
    else:
        cast = kernels.triton_fp8_colwise_3d_scale_and_cast
    right, scales = cast(stack.mT, _DTYPE, **_POWERS)
    return _scaled_product(left, left_scales.flatten(), right, scales.flatten(1), ends)


def _sum_products(left: Tensor, right: Tensor, ends: Tensor, how: _How) -> Tensor:
    """The sums [experts, a, b] of products of each expert's rows [rows, a] and [rows, b]."""
    if how.emulate:
        if not how.exact_gradients:
            left, right = (_rounded_by_groups(one, ends) for one in (left, right))
        numbers = numbers_of(ends, len(left))
        every = range(len(ends))
        return torch.stack([torch.where(numbers == one, left.mT, 0) @ right for one in every])
    if how.exact_gradients:
        return F.grouped_mm(left.mT, right, offs=ends)
    left, left_scales, right, scales = kernels.triton_fp8_per_group_colwise_scales_dual(
        left, right, ends, _DTYPE, **_POWERS
    )
    return _scaled_product(left.mT, left_scales, right, scales, ends)


def _scaled_product(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, ends: Tensor
) -> Tensor:
    """The grouped product, in bfloat16, of what was cast after it was multiplied with scales."""
    inverse = left_scales.reciprocal(), right_scales.reciprocal()
    product: Tensor = torch._scaled_grouped_mm(
        left, right, *inverse, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return product


def _rounded(values: Tensor, dim: int) -> Tensor:
    """Values as they are after a cast with a scale for all along this dimension."""
    return _cast_and_back(values, values.abs().amax(dim, keepdim=True))


def _rounded_by_groups(rows: Tensor, ends: Tensor) -> Tensor:
    """Rows as they are after a cast with a scale for each column of each expert's rows."""
    numbers = numbers_of(ends, len(rows))
    wide = numbers[:, None].expand_as(rows)
    largest = rows.new_zeros(len(ends), rows.shape[1])
    return _cast_and_back(rows, largest.scatter_reduce(0, wide, rows.abs(), "amax")[numbers])


def _cast_and_back(values: Tensor, largest: Tensor) -> Tensor:
    """Values after a cast that is scaled by powers of two, as torchao's kernels do it."""
    scales = torch.finfo(_DTYPE).max / largest.double().clamp(min=1e-12)
    scales = scales.float().log2().floor().exp2()
    cast: Tensor = to_fp8_saturated(values * scales, _DTYPE)
    return (cast.to(scales.dtype) / scales).to(values.dtype)
