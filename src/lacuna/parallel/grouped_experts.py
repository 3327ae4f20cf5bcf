"""Experts of grouped products, between which tokens are permuted by gathers alone.

It is transformers' "grouped_mm" computed another way, with the same results but for rounding:
gradients of tokens and of biases need no accumulation by indices, no rows are masked, as there are
none to mask, and weights are multiplied with what is narrow.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

from lacuna.parallel.expert_stacks import stacks_of
from lacuna.parallel.permutation import copied_rows, order_of, set_apart, summed_rows, taken_from

PLAIN = "grouped_mm"  # transformers' name of its own
GROUPED = "lacuna_grouped_mm"
OWN_PRODUCT = "grouped_product"  # the method of experts that multiply otherwise than transformers
EVEN = 16  # such a product has a multiple of these rows for each expert, and no expert has none


def install_grouped_experts(model: nn.Module) -> None:
    """Has experts that transformers would compute by its grouped products be computed here.

    That is noted in the model's configuration, in place.
    """
    ALL_EXPERTS_FUNCTIONS.register(GROUPED, grouped_experts)
    for stack in stacks_of([model]):
        settings: Any = stack.config
        if settings._experts_implementation == PLAIN:
            settings._experts_implementation = GROUPED


def grouped_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The weighted sum of the chosen experts' outputs, [tokens, width] as `hidden_states`.

    `top_k_index` and `top_k_weights` are [tokens, k]; or both are [tokens], and tokens are in the
    order of the one expert that each has. `self` has the stacks of all experts.
    """
    if top_k_index.ndim == 1:
        return _weighted_outputs(self, hidden_states, top_k_index, top_k_weights)
    # GPUs sort by digits, of which int32 has half as many.
    numbers, order = top_k_index.flatten().int().sort(stable=True)
    where = order_of(order, top_k_index.shape[1])
    weights = copied_rows(top_k_weights.flatten(), where.of_each())
    rows = copied_rows(hidden_states, where)
    outputs = _weighted_outputs(self, rows, numbers, weights)
    return summed_rows(outputs, where).to(hidden_states.dtype)


def _weighted_outputs(experts: Any, rows: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """What the experts of these `numbers`, by which rows are sorted, make of rows, weighted."""
    every = torch.arange(experts.num_experts, device=numbers.device, dtype=numbers.dtype)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    if not hasattr(experts, OWN_PRODUCT):
        return _outputs(experts, rows, numbers, ends, weights)
    places, ends, count = _even_groups(numbers, ends)
    numbers = numbers_of(ends, count)
    rows = set_apart(rows, places, count)
    weights = set_apart(weights, places, count)
    return taken_from(_outputs(experts, rows, numbers, ends, weights), places)


def numbers_of(ends: Tensor, rows: int) -> Tensor:
    """The numbers of the experts of so many rows, of which those of each expert end at `ends`."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)


def _even_groups(numbers: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where rows of experts with these `numbers` are if each expert has a multiple of `EVEN`.

    Rows are sorted by `numbers`, and those of each expert end at `ends`. Returns their places, the
    new ends, and the number of places, to which the last expert's rows go on: how many there really
    are is not known on a CPU.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    even = counts.clamp(min=1).add(EVEN - 1) // EVEN * EVEN
    new_ends = even.cumsum(0, dtype=ends.dtype)
    count = (len(numbers) + EVEN - 1) // EVEN * EVEN + EVEN * len(ends)
    before = (new_ends - even) - (ends - counts)
    places = torch.arange(len(numbers), device=ends.device) + before[numbers]
    new_ends[-1:] = count
    return places, new_ends, count


def _outputs(experts: Any, rows: Tensor, numbers: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """What experts make of rows, of which those of each end at `ends`, weighted.

    What the last matrices are given is weighted instead of what they make, which is as much: that
    is less to do, and gradients of weights then need nothing of what they make.
    """
    scales = weights[:, None]
    if experts.has_gate:
        inner = experts._apply_gate(_product(experts, "gate_up_proj", rows, numbers, ends))
    else:
        inner = experts.act_fn(_product(experts, "up_proj", rows, numbers, ends))
    if getattr(experts, "has_post_expert_norm", False):  # since transformers 5.23 or before
        outputs = _product(experts, "down_proj", inner, numbers, ends)
        return experts.post_expert_norm(outputs) * scales  # type: ignore[no-any-return]
    inner = (inner * scales).to(inner.dtype)
    return _product(experts, "down_proj", inner, numbers, ends, scales)


def _product(
    experts: Any,
    name: str,
    rows: Tensor,
    numbers: Tensor,
    ends: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Rows, which are sorted by the `numbers` of their experts, times these experts' matrices.

    `ends` are where the rows of each expert end. Biases are added, times `scales` if there are any.
    """
    stack = getattr(experts, name)
    product: Tensor
    if hasattr(experts, OWN_PRODUCT):
        product = experts.grouped_product(name, rows, stack, ends)
    else:
        product = _grouped_linear(rows, stack, ends, is_transposed=experts.is_transposed)
    if not experts.has_bias:
        return product
    biases: Tensor = _Biases.apply(  # type: ignore[no-untyped-call]
        getattr(experts, f"{name}_bias"), numbers
    )
    return product + (biases if scales is None else (biases * scales).to(biases.dtype))


class _Biases(torch.autograd.Function):
    """The bias of each row's expert: its gradient is a product, not a sum of rows in turn."""

    @staticmethod
    def forward(ctx: Any, biases: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.experts = len(biases)
        return biases[numbers]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [numbers] = ctx.saved_tensors
        experts = torch.arange(ctx.experts, device=numbers.device)[:, None]
        return (numbers == experts).to(gradients[0].dtype) @ gradients[0], None
