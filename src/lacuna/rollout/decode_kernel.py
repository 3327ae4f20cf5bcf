"""The kernel of decode attention for GPUs, in Triton: split over pages, by groups of heads."""

# Triton's arguments have no types but constexpr.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lacuna.rollout.decode_attention import LARGEST, SMALLEST

# Programs for each multiprocessor that there should be at least: more are split over pages.
_PROGRAMS = 4
_SPLITS = 32
# Bytes of keys that are seen at once, as they are computed with: a page, unless heads are wide.
_TILE_BYTES = 2**15
_LOG2_OF_E = math.log2(math.e)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


def attend_in_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    pages: Tensor,
    positions: Tensor,
    scaling: float,
    window: int,
    splits: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """The same as `decode_attention`. `splits` are programs for each sequence and key head.

    Unless set, these, `warps` and the `stages` of reading ahead suit the device, the width of heads
    and what is stored.
    """
    query = query.contiguous()
    rows, heads, width = query.shape
    if value.stride()[1:] != (width, 1):  # a part of a wider product is read where it is
        value = value.contiguous()
    key_heads, size = keys.shape[1:3]
    splits = splits or _splits_for(rows * key_heads, query.device)
    padded = max(triton.next_power_of_2(width), 16)
    output = torch.empty_like(query)
    found = (output, output)
    if splits > 1:
        parts = query.new_empty(rows, heads, splits, width, dtype=torch.float32)
        found = (parts, query.new_empty(rows, heads, splits, dtype=torch.float32))
    known = (value.stride(0), pages, pages.stride(0), positions, scaling * _LOG2_OF_E)
    stored = (keys, values, *((keys, values) if scales is None else scales))
    _attend[(rows, key_heads, splits)](
        *(query, key.contiguous(), value, *stored, *found, *known),
        WINDOW=window,
        GROUP=heads // key_heads,
        QUERIES=max(triton.next_power_of_2(heads // key_heads), 16),
        WIDTH=width,
        PADDED=padded,
        SIZE=size,
        TILE=tile_of_page(size, padded, query.element_size()),
        SPLITS=splits,
        num_warps=warps or (2 if scales is not None and padded <= 128 else 4),
        num_stages=stages or (2 if padded > 128 else 3),
    )
    if splits > 1:
        _merge[(rows * heads,)](*found, output, WIDTH=width, PADDED=padded, SPLITS=splits)
    return output


def tile_of_page(size: int, padded: int, element_size: int) -> int:
    """The tokens of a page, of `size` tokens, that are read at once: a power of 2, at least 16."""
    return min(size, max(_TILE_BYTES // (padded * element_size), 16))


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
    key_scales,
    value_scales,
    output,
    lse,
    value_of_row,
    pages,
    pages_of_row,
    positions,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A split of the pages of one sequence, for the queries of one key head."""
    row = tl.program_id(0)
    of_head = row * tl.num_programs(1) + tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    table = pages + row * pages_of_row
    numbers = tl.arange(0, QUERIES)
    columns = tl.arange(0, PADDED)
    of_queries = of_head * GROUP + numbers
    real = (numbers < GROUP)[:, None] & (columns < WIDTH)[None, :]
    q, scale = _queries(query + of_queries[:, None] * WIDTH + columns[None, :], real, scale, keys)
    stored = (keys, values, key_scales, value_scales)
    highest, total, sums = _nothing_seen(QUERIES, PADDED)
    if tl.program_id(2) == 0:
        new = (key + of_head * WIDTH, value + row * value_of_row + tl.program_id(1) * WIDTH)
        place = _page(table, position // SIZE, SIZE) + position % SIZE
        highest, total, sums = _see_new(q, *new, *stored, place, sums, scale, WIDTH)
    begin, end = _pages_of_split(position, WINDOW, SIZE, SPLITS)
    for number in range(begin * (SIZE // TILE), end * (SIZE // TILE)):
        tile = _page(table, number * TILE // SIZE, SIZE) + number * TILE % SIZE
        seen = _seen(position, number, WINDOW, TILE)
        highest, total, sums = _see_tile(q, *stored, tile, seen, highest, total, sums, scale, WIDTH)
    into = of_queries * SPLITS + tl.program_id(2)
    total = tl.maximum(total, 1e-30)  # it is 0 in a split without pages
    tl.store(output + into[:, None] * WIDTH + columns[None, :], sums / total[:, None], mask=real)
    if SPLITS > 1:
        tl.store(lse + into, highest + tl.log2(total), mask=numbers < GROUP)


@triton.jit
def _queries(places, real, scale, keys):
    """Queries in the dtype in which they are multiplied with keys, and the scale of each.

    float8 becomes float16 in one instruction, bfloat16 in several; no query is beyond float16 then.
    """
    q = tl.load(places, mask=real, other=0.0)
    scales = tl.full([q.shape[0]], scale, tl.float32)
    if keys.dtype.element_ty == tl.float8e4nv and q.dtype != tl.float32:
        largest = tl.maximum(tl.max(tl.abs(q), 1).to(tl.float32), _SMALLEST)
        q = (q.to(tl.float32) / largest[:, None]).to(tl.float16)
        scales *= largest
    return q, scales


@triton.jit
def _nothing_seen(QUERIES: tl.constexpr, PADDED: tl.constexpr):
    """The highest score, the total of weights and the weighted values of no keys."""
    highest = tl.full([QUERIES], -1e30, tl.float32)
    return highest, tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, PADDED], tl.float32)


@triton.jit
def _page(table, number, size: tl.constexpr):
    """The first token of a page of a sequence, among those of the key head of this program."""
    page = tl.load(table + number).to(tl.int64)
    return (page * tl.num_programs(1) + tl.program_id(1)) * size


@triton.jit
def _see_new(
    q,
    key,
    value,
    keys,
    values,
    key_scales,
    value_scales,
    place,
    sums,
    scale,
    WIDTH: tl.constexpr,
):
    """Writes the new token to its place, and attends to it first; returns as `_see_tile` does."""
    new_key = _write_new(key, keys + place * WIDTH, key_scales + place, q.shape[1], WIDTH)
    new_value = _write_new(value, values + place * WIDTH, value_scales + place, q.shape[1], WIDTH)
    highest = tl.sum(q.to(tl.float32) * new_key[None, :], 1) * scale
    return highest, tl.full(highest.shape, 1.0, tl.float32), sums + new_value[None, :]


@triton.jit
def _write_new(new, place, of_place, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Writes the key or value of the new token, in float8 with its scale; returns what it wrote."""
    columns = tl.arange(0, PADDED)
    found = tl.load(new + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    scale = 1.0
    if place.dtype.element_ty == tl.float8e4nv:
        scale = tl.maximum(tl.max(tl.abs(found), 0) / _LARGEST, _SMALLEST)
        tl.store(of_place, scale)
    stored = (found / scale).to(place.dtype.element_ty)
    tl.store(place + columns, stored, mask=columns < WIDTH)
    return stored.to(tl.float32) * scale


@triton.jit
def _seen(position, number, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Which tokens of a tile are seen, and so read: the others may be anything, also nan."""
    places = number * TILE + tl.arange(0, TILE)
    seen = places < position
    if WINDOW > 0:
        seen = seen & (places > position - WINDOW)
    return seen


@triton.jit
def _pages_of_split(position, WINDOW: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """The first page of a split, and the one beyond: of the tokens before the new one."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // SIZE
    beyond = (position + SIZE - 1) // SIZE
    each = (beyond - first + SPLITS - 1) // SPLITS
    begin = first + tl.program_id(2) * each
    return begin, tl.minimum(begin + each, beyond)


@triton.jit
def _see_tile(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    first,
    seen,
    highest,
    total,
    sums,
    scale,
    WIDTH: tl.constexpr,
):
    """Attends to a tile from its first place on, with a scale for each query.

    Returns the highest score so far, the total of weights, and weighted values.
    """
    columns = tl.arange(0, q.shape[1])
    places = tl.arange(0, seen.shape[0])
    tile = places[:, None] * WIDTH + columns[None, :]
    read = seen[:, None] & (columns < WIDTH)[None, :]
    k = tl.load(keys + first * WIDTH + tile, mask=read, other=0.0).to(q.dtype)
    v = tl.load(values + first * WIDTH + tile, mask=read, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale[:, None]
    if keys.dtype.element_ty == tl.float8e4nv:
        scores *= tl.load(key_scales + first + places, mask=seen, other=0.0)[None, :]
    scores = tl.where(seen[None, :], scores, -1e30)
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    decay = tl.exp2(highest - higher)
    total = total * decay + tl.sum(weights, 1)
    sums *= decay[:, None]
    if keys.dtype.element_ty == tl.float8e4nv:
        of_values = tl.load(value_scales + first + places, mask=seen, other=0.0)
        # So that no weight is beyond what float16 can be.
        largest = tl.maximum(tl.max(of_values, 0), _SMALLEST)
        weights *= (of_values / largest)[None, :]
        sums += tl.dot(weights.to(v.dtype), v, input_precision="ieee") * largest
    else:
        sums = tl.dot(weights.to(v.dtype), v, sums, input_precision="ieee")
    return higher, total, sums


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
