"""The kernel of decode attention for GPUs, in Triton: split over pages, by groups of heads."""

# Triton's arguments have no types but constexpr.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs for each multiprocessor that there should be at least: more are split over pages.
_PROGRAMS = 4
_SPLITS = 32


def attend_in_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    positions: Tensor,
    scaling: float,
    window: int,
    splits: int | None = None,
    warps: int = 4,
    stages: int | None = None,
) -> Tensor:
    """The same as `decode_attention`. `splits` are programs for each sequence and key head.

    Unless set, these and the `stages` of reading ahead suit the device and the width of heads.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    rows, heads, width = query.shape
    key_heads, size = keys.shape[1:3]
    if splits is None:
        splits = _splits_for(rows * key_heads, query.device)
    output = torch.empty_like(query)
    parts = output
    lse = output
    if splits > 1:
        parts = query.new_empty(rows, heads, splits, width, dtype=torch.float32)
        lse = query.new_empty(rows, heads, splits, dtype=torch.float32)
    padded = max(triton.next_power_of_2(width), 16)
    group = heads // key_heads
    _attend[(rows, key_heads, splits)](
        query,
        key,
        value,
        keys,
        values,
        pages,
        positions,
        parts,
        lse,
        scaling * 1.4426950408889634,  # log2(e): the kernel takes powers of 2
        pages.stride(0),
        key_heads,
        WINDOW=window,
        GROUP=group,
        QUERIES=max(triton.next_power_of_2(group), 16),
        WIDTH=width,
        PADDED=padded,
        SIZE=size,
        SPLITS=splits,
        num_warps=warps,
        num_stages=stages or (2 if padded > 128 else 3),
    )
    if splits > 1:
        _merge[(rows * heads,)](
            parts, lse, output, WIDTH=width, PADDED=padded, SPLITS=splits, num_warps=4
        )
    return output


def _splits_for(programs: int, device: torch.device) -> int:
    """A power of 2: by how many programs each of as many must be divided to fill the device."""
    if device.type != "cuda":
        return 1
    places = _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    return min(int(triton.next_power_of_2(max(places // programs, 1))), _SPLITS)


@triton.jit
def _attend(
    query,
    key,
    value,
    keys,
    values,
    pages,
    positions,
    output,
    lse,
    scale,
    pages_of_row,
    key_heads,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A split of the pages of one sequence, for the queries of one key head."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // SIZE
    # The pages of the tokens before the new one.
    beyond = (position + SIZE - 1) // SIZE
    each = (beyond - first + SPLITS - 1) // SPLITS
    begin = first + split * each
    end = tl.minimum(begin + each, beyond)

    numbers = tl.arange(0, QUERIES)
    columns = tl.arange(0, PADDED)
    within = tl.arange(0, SIZE)
    inside = columns < WIDTH
    own = (row * key_heads + head) * GROUP + numbers
    is_query = numbers < GROUP
    both = is_query[:, None] & inside[None, :]
    q = tl.load(query + own[:, None] * WIDTH + columns[None, :], mask=both, other=0.0)
    table = pages + row.to(tl.int64) * pages_of_row

    highest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, PADDED], tl.float32)
    if split == 0:
        # The new token is attended to as it comes, and written into its page for the next.
        new = (row * key_heads + head) * WIDTH + columns
        new_key = tl.load(key + new, mask=inside, other=0.0)
        new_value = tl.load(value + new, mask=inside, other=0.0)
        page = tl.load(table + position // SIZE).to(tl.int64)
        place = ((page * key_heads + head) * SIZE + position % SIZE) * WIDTH + columns
        tl.store(keys + place, new_key, mask=inside)
        tl.store(values + place, new_value, mask=inside)
        highest = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        sums += new_value.to(tl.float32)[None, :]

    tile = within[:, None] * WIDTH + columns[None, :]
    for number in range(begin, end):
        page = tl.load(table + number).to(tl.int64)
        start = (page * key_heads + head) * SIZE * WIDTH
        places = number * SIZE + within
        # What is not seen is not read, since it may be anything, also nan.
        seen = places < position
        if WINDOW > 0:
            seen = seen & (places > position - WINDOW)
        read = seen[:, None] & inside[None, :]
        k = tl.load(keys + start + tile, mask=read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(highest - higher)
        v = tl.load(values + start + tile, mask=read, other=0.0)
        total = total * decay + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * decay[:, None], input_precision="ieee")
        highest = higher

    # A split without pages has the total 0 and counts for nothing.
    sums = sums / tl.maximum(total, 1e-30)[:, None]
    into = (own[:, None] * SPLITS + split) * WIDTH + columns[None, :]
    tl.store(output + into, sums.to(output.dtype.element_ty), mask=both)
    if SPLITS > 1:
        logs = tl.where(total > 0, highest + tl.log2(tl.maximum(total, 1e-30)), -1e30)
        tl.store(lse + own * SPLITS + split, logs, mask=is_query)


@triton.jit
def _merge(parts, lse, output, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """The attention of one query, of what its splits have found."""
    query = tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    logs = tl.load(lse + query * SPLITS + splits)
    weights = tl.exp2(logs - tl.max(logs, 0))
    tile = (query * SPLITS + splits)[:, None] * WIDTH + columns[None, :]
    found = tl.load(parts + tile, mask=inside[None, :], other=0.0)
    merged = tl.sum(found * weights[:, None], 0) / tl.sum(weights, 0)
    place = query * WIDTH + columns
    tl.store(output + place, merged.to(output.dtype.element_ty), mask=inside)
