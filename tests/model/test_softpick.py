"""Softpick and rectified softmax are what their formulas say, with exact gradients."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.model import softpick
from lacuna.model.merged_attention import merged_attention
from lacuna.model.own_attention import register
from lacuna.parallel.context import causal_parts, gather_sequence, ring_attention, shard_sequence
from lacuna.parallel.partial_attention import PARTIAL_ATTENTIONS, Part, visible
from tiny import relative_error, run_ranks

LENGTH = 24
BOUNDS = torch.tensor([0, 9, 24, 25, 48, 48], dtype=torch.int32)
PART = Part(BOUNDS, BOUNDS, 23, LENGTH)
KINDS = ("softpick", "rectified")
SCALING = 0.4


@pytest.fixture(autouse=True)
def known() -> None:
    for kind in KINDS:
        register(kind)


def tensors(dtype: torch.dtype = torch.float64, width: int = 8) -> tuple[Tensor, ...]:
    """Queries with 4 heads, keys and values with 2, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, width), (4, width))
    drawn = (torch.randn(2, LENGTH, *shape, generator=generator) for shape in shapes)
    return tuple(one.to(dtype) for one in drawn)


def by_formula(kind: str, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """The attention by its definition, in the dtype that is given."""
    key, value = (one.repeat_interleave(2, dim=2) for one in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * SCALING
    seen = visible(PART, 2, LENGTH, window)[:, None]
    if kind == "softpick":
        terms = torch.where(seen, scores.exp() - 1, 0)
        highest = scores.masked_fill(~seen, 0).amax(-1, keepdim=True).clamp(min=0)
        epsilon = softpick.EPSILON * highest.exp().detach()
        weights = terms.relu() / (terms.abs().sum(-1, keepdim=True) + epsilon)
    else:
        terms = torch.where(seen & (scores >= 0), scores.exp(), 0)
        total = terms.sum(-1, keepdim=True)
        weights = terms / torch.where(total == 0, 1, total)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "width"), [(None, 8), (5, 8), (None, 6)])
def test_values_and_gradients_are_those_of_the_formula(
    kind: str, window: int | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softpick, "_QUERIES", 7)
    *inputs, grad = tensors(width=width)
    results = []
    for attend in (merged_attention, by_formula):
        leaves = [one.clone().requires_grad_() for one in inputs]
        told = (PART, SCALING, window) if attend is merged_attention else (window,)
        output = attend(kind, *leaves, *told)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, grad)])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error({"": ours}, {"": theirs}) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 3])
def test_gradients_are_those_of_differences(kind: str, window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    part = Part(bounds, bounds, 4, 6)
    inputs = [
        torch.randn(1, 6, heads, 3, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    attend = partial(merged_attention, kind)
    assert torch.autograd.gradcheck(
        lambda *given: attend(*given, part, SCALING, window), inputs, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1.0, 200.0])
def test_no_score_makes_a_number_that_is_none(kind: str, dtype: torch.dtype, size: float) -> None:
    """Scores of some rows are all negative, others are far beyond 88, where e^x overflows."""
    query, key, value, grad = tensors(dtype)
    query[0], key[0] = query[0].abs() * size, -key[0].abs()
    query[1], key[1] = query[1] * size, key[1] * size
    leaves = [one.requires_grad_() for one in (query, key, value)]
    output = merged_attention(kind, *leaves, PART, SCALING, None)
    grads = torch.autograd.grad(output, leaves, grad)
    assert all(one.isfinite().all() for one in (output, *grads))
    assert output.dtype == dtype
    if size >= 1:
        assert not output[0].any(), "rows of negative scores give nothing"
        assert not any(one[0].any() for one in grads), "and learn nothing"
        assert output[1].any()


def on_one_device(kind: str) -> list[Tensor]:
    *inputs, grad = tensors()
    leaves = [one.requires_grad_() for one in inputs]
    output = merged_attention(kind, *leaves, PART, SCALING, None)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def error_in_ring(kind: str) -> float:
    """The largest relative difference of a ring's outputs and gradients from one device's."""
    register(kind)
    group = dist.group.WORLD
    shards = [shard_sequence(one, 1, group.size(), group.rank()) for one in tensors(torch.float32)]
    *leaves, grad = (one.transpose(1, 2).requires_grad_() for one in shards)
    output = ring_attention(*leaves, BOUNDS, 23, group, SCALING, kind)
    ours = [output, *torch.autograd.grad(output, leaves, grad)]
    gathered = [gather_sequence(one.detach(), 2, group).transpose(1, 2) for one in ours]
    pairs = zip(gathered, on_one_device(kind), strict=True)
    return max(relative_error({"": one}, {"": whole}) for one, whole in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_merges_what_its_ranks_find(kind: str) -> None:
    """Softpick's epsilon is counted once for each rank."""
    assert max(run_ranks(2, error_in_ring, kind)) < 10 * softpick.EPSILON


def test_queries_of_a_part_without_keys_add_nothing() -> None:
    cu_q = torch.tensor([0, 4, 8], dtype=torch.int32)
    cu_k = torch.tensor([0, 0, 8], dtype=torch.int32)
    query, key, value, _ = (one[:1, :8].float() for one in tensors())
    part = Part(cu_q, cu_k, 8, 8, causal=False)
    for kind in KINDS:
        output, lse = PARTIAL_ATTENTIONS[kind][0](query, key, value, part, SCALING)
        assert not output[:, :4].any() and (lse[:, :4] == -torch.inf).all()
        assert output[:, 4:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiler_is_told_what_the_operator_returns(kind: str) -> None:
    *inputs, _ = (one.float().requires_grad_() for one in tensors(width=6))
    settings = (BOUNDS, BOUNDS, 23, LENGTH, True, False, SCALING, 5, kind)
    torch.library.opcheck(torch.ops.lacuna.merged_attention.default, (*inputs, *settings))


def test_parts_of_gathered_keys_see_what_the_whole_sees() -> None:
    query, key, value, _ = tensors()
    whole = merged_attention("softpick", query, key, value, PART, SCALING, 7)
    for rank in range(2):
        parts = tuple(causal_parts(BOUNDS, LENGTH, 2, rank, 23))
        own = shard_sequence(query, 1, 2, rank).chunk(2, 1)
        outputs = [
            merged_attention(
                "softpick", queries, key[:, : part.stop], value[:, : part.stop], part, SCALING, 7
            )
            for part, queries in zip(parts, own, strict=True)
        ]
        torch.testing.assert_close(torch.cat(outputs, 1), shard_sequence(whole, 1, 2, rank))
