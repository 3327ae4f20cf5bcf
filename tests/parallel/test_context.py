"""Rows of tokens cut over ranks attend as they do on one device, gradients included."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lacuna.parallel.context import causal_parts, gather_sequence, ring_attention, shard_sequence
from lacuna.parallel.partial_attention import flash_bounds, visible
from tiny import relative_error, run_ranks

LENGTH = 32
ROWS = (
    (32,),
    (1, 1, 6, 13, 1, 10),
    (11, 21),
)  # in the second row a document ends where a chunk does
LENGTHS = torch.tensor([length for row in ROWS for length in row])
BOUNDS = F.pad(LENGTHS, (1, 3)).cumsum(0).int()  # the last three documents are empty
WINDOW = 5
SCALING = 0.3
EXACT = 1e-6


def document_mask(window: int | None) -> Tensor:
    """Which keys each query sees, from the number of each token's document: bool [B, T, T]."""
    places = torch.arange(LENGTH)
    document = torch.arange(len(LENGTHS)).repeat_interleave(LENGTHS).view(len(ROWS), LENGTH)
    distance = places[:, None] - places
    return (
        (document[:, :, None] == document[:, None])
        & (distance >= 0)
        & (distance < (window or LENGTH))
    )


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_mask_of_the_documents(cp: int, window: int | None) -> None:
    mask = document_mask(window)
    for rank in range(cp):
        parts = tuple(causal_parts(BOUNDS, LENGTH, cp, rank, LENGTH))
        own = shard_sequence(torch.arange(LENGTH), 0, cp, rank)
        for part, queries in zip(parts, own.chunk(len(parts)), strict=True):
            seen = visible(part, len(ROWS), len(queries), window)
            assert torch.equal(F.pad(seen, (0, LENGTH - part.stop)), mask[:, queries])
            assert part.cu_q.dtype == part.cu_k.dtype == torch.int32
            assert (part.cu_q[-1], part.cu_k[-1]) == (
                len(ROWS) * len(queries),
                len(ROWS) * part.stop,
            )
            _, _, longest_q, longest_k = flash_bounds(part, len(queries))
            assert longest_q >= part.cu_q.diff().max() and longest_k >= part.cu_k.diff().max()


def test_a_part_is_no_longer_than_the_longest_document() -> None:
    head, tail = causal_parts(BOUNDS, LENGTH, 2, 0, 11)
    assert (*flash_bounds(head, 8)[2:], head.stop) == (8, 8, 8)
    assert (*flash_bounds(tail, 8)[2:], tail.stop) == (8, 11, 32)


def whole_rows() -> tuple[Tensor, ...]:
    """Queries with 4 heads, keys and values with 2, and the gradient of the output.

    All are float64 [B, heads, T, 8].
    """
    torch.manual_seed(0)
    return tuple(
        torch.randn(len(ROWS), heads, LENGTH, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)
    )


def on_one_device(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    mask = document_mask(window)[:, None]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=SCALING, enable_gqa=True)


def by_gathering(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    group = dist.group.WORLD
    key, value = (gather_sequence(tensor, 2, group) for tensor in (key, value))
    parts = tuple(causal_parts(BOUNDS, LENGTH, group.size(), group.rank(), LENGTH))
    outputs = []
    for part, queries in zip(parts, query.chunk(len(parts), 2), strict=True):
        mask = visible(part, len(ROWS), queries.shape[2], window)[:, None]
        keys, values = key[:, :, : part.stop], value[:, :, : part.stop]
        outputs.append(
            F.scaled_dot_product_attention(
                queries, keys, values, mask, scale=SCALING, enable_gqa=True
            )
        )
    return torch.cat(outputs, 2)


def by_ring(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ring_attention(query, key, value, BOUNDS, LENGTH, dist.group.WORLD, SCALING)


def output_and_gradients(
    attend: Callable[..., Tensor], tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    *leaves, grad = (tensor.clone().requires_grad_() for tensor in tensors)
    output = attend(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


def error(
    attend: Callable[..., Tensor], window: int | None = None, dtype: torch.dtype = torch.float32
) -> float:
    """The largest difference of output and gradients, gathered from all ranks, from one device's.

    It is relative, to float64.
    """
    group = dist.group.WORLD
    shards = tuple(
        shard_sequence(tensor, 2, group.size(), group.rank()).to(dtype) for tensor in whole_rows()
    )
    results = output_and_gradients(attend, shards)
    expected = output_and_gradients(partial(on_one_device, window=window), whole_rows())
    assert all(result.dtype == dtype for result in results)
    pairs = zip((gather_sequence(result, 2, group) for result in results), expected, strict=True)
    return max(relative_error({"": result}, {"": right}) for result, right in pairs)


def errors_of_rank() -> dict[str, float]:
    return {
        "gathered": error(by_gathering),
        "gathered, in a window": error(partial(by_gathering, window=WINDOW), WINDOW),
        "ring": error(by_ring),
        "ring, bfloat16": error(by_ring, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_attention_over_ranks_equals_attention_on_one(ranks: int) -> None:
    for errors in run_ranks(ranks, errors_of_rank):
        assert errors.pop("ring, bfloat16") < 5e-3
        assert max(errors.values()) < EXACT, errors


def compiled_errors() -> list[float]:
    whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
    return [error(whole(by_gathering)), error(whole(by_ring))]


def test_it_compiles_without_a_break() -> None:
    assert max(max(errors) for errors in run_ranks(2, compiled_errors)) < EXACT
