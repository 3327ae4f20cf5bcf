"""The forward pass of softpick and of rectified softmax, by Triton.

A running m is the largest score so far, but at least 0, and every term is divided by 2^m, so that
what was summed is rescaled by one factor when m grows.
"""

import triton
import triton.language as tl

from lacuna.model.softpick_blocks import (
    head_of,
    load_rows,
    sight_of_block,
    step_of,
    steps_of,
    store_rows,
    zeros,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _add_keys(
    found,
    query,
    key,
    value,
    strides,
    full,
    some,
    sees,
    length,
    factor,
    RECTIFIED: tl.constexpr,
    MASKED: tl.constexpr,
    WIDTHS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Adds keys to the largest score, the denominator and the output `found` so far."""
    highest, total, output = found
    for index in range(steps_of(full, some, MASKED, KEYS[0])):
        start = step_of(index, full, some, MASKED, KEYS[0])
        own = load_rows(key, strides[0], start, length, WIDTHS[0], KEYS, MASKED)
        scores = tl.dot(query, tl.trans(own))
        if MASKED:
            place = start + tl.arange(0, KEYS[0])
            seen = (place[None, :] >= sees[0][:, None]) & (place[None, :] < sees[1][:, None])
            # Softpick's term of a score of 0 is exactly 0.
            scores = tl.where(seen, scores, -float("inf") if RECTIFIED else 0.0)
        new = tl.maximum(highest, tl.max(scores, 1) * factor)
        rescale = tl.exp2(highest - new)
        terms = tl.exp2(scores * factor - new[:, None])
        if RECTIFIED:
            terms = tl.where(scores >= 0, terms, 0.0)
            total = total * rescale + tl.sum(terms, 1)
        else:
            terms = terms - tl.exp2(-new)[:, None]
            total = total * rescale + tl.sum(tl.abs(terms), 1)
            terms = tl.maximum(terms, 0.0)
        given = load_rows(value, strides[1], start, length, WIDTHS[1], VALUES, MASKED)
        output = tl.dot(terms.to(given.dtype), given, output * rescale[:, None])
        highest = new
    return highest, total, output


@triton.jit
def _denominator(highest, total, sees, epsilon, RECTIFIED: tl.constexpr):
    """What outputs are divided by, and the logarithm of the denominator: -inf without any key."""
    if RECTIFIED:
        nothing = total == 0
        total = tl.where(nothing, 1.0, total)
    else:
        nothing = sees[1] <= sees[0]
        total = total + epsilon
    return total, tl.where(nothing, -float("inf"), (highest + tl.log2(total)) * LN_2)


@triton.jit
def forward_kernel(
    tensors,
    results,
    sight,
    strides,
    sizes,
    factor,
    epsilon,
    RECTIFIED: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTHS: tl.constexpr,
    QUERIES: tl.constexpr,
    GRADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """The output of a block of queries of one head, and the logarithm of its denominator."""
    heads, key_heads, tokens, length = sizes
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    key_head = head // (heads // key_heads)
    # The longest blocks come first, so that the last ones to end are short.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES[0]
    full, some, sees = sight_of_block(
        sight, row, start, tokens, length, WHOLE, False, QUERIES[0], KEYS[0]
    )
    at = head_of(tensors[0], strides[0], row, head)
    query = load_rows(at, strides[0][1], start, tokens, WIDTHS[0], QUERIES, True)
    key = head_of(tensors[1], strides[1], row, key_head)
    value = head_of(tensors[2], strides[2], row, key_head)
    steps = (strides[1][1], strides[2][1])
    none = tl.zeros_like(sees[0]).to(tl.float32)
    found = (none, none, zeros(GRADS))
    for masked in tl.static_range(2):
        given = (found, query, key, value, steps, full, some, sees, length, factor)
        found = _add_keys(*given, RECTIFIED, masked == 1, WIDTHS, KEYS, VALUES)
    highest, total, output = found
    total, logarithm = _denominator(highest, total, sees, epsilon, RECTIFIED)
    place = start + tl.arange(0, QUERIES[0])
    tl.store(results[1] + (row * heads + head) * tokens + place, logarithm, mask=place < tokens)
    at = results[0] + (row * tokens * heads + head) * WIDTHS[1]
    store_rows(at, heads * WIDTHS[1], start, tokens, output / total[:, None], WIDTHS[1], GRADS)
