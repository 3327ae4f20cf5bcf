"""The backward pass of softpick and of rectified softmax, by Triton.

Given the logarithm of a query's denominator, the share of a key is e^(x - lse). One kernel goes by
keys, one by queries, so that nothing is added by several programs at once and results are the same
whenever they are computed.
"""

import triton
import triton.language as tl

from lacuna.model.softpick_blocks import (
    LOG2_E,
    gradients_of_scores,
    head_of,
    load_rows,
    shares_and_weights,
    sight_of_block,
    step_of,
    steps_of,
    store_rows,
    zeros,
)


@triton.jit
def _add_queries(
    found,
    query,
    grad,
    statistics,
    key,
    value,
    strides,
    full,
    some,
    sees,
    tokens,
    factor,
    RECTIFIED: tl.constexpr,
    MASKED: tl.constexpr,
    WIDTHS: tl.constexpr,
    QUERIES: tl.constexpr,
    GRADS: tl.constexpr,
):
    """Adds what queries give to the gradients `found` of a block of keys."""
    of_key, of_value = found
    for index in range(steps_of(full, some, MASKED, QUERIES[0])):
        start = step_of(index, full, some, MASKED, QUERIES[0])
        own = load_rows(query, strides[0], start, tokens, WIDTHS[0], QUERIES, MASKED)
        given = load_rows(grad, strides[1], start, tokens, WIDTHS[1], GRADS, MASKED)
        place = start + tl.arange(0, QUERIES[0])
        inside = place < tokens
        seen = inside[None, :]
        if MASKED:
            seen = (place[None, :] >= sees[0][:, None]) & (place[None, :] < sees[1][:, None])
            logarithm = tl.load(statistics[0] + place, mask=inside, other=0.0) * LOG2_E
            delta = tl.load(statistics[1] + place, mask=inside, other=0.0)
        else:
            logarithm = tl.load(statistics[0] + place) * LOG2_E
            delta = tl.load(statistics[1] + place)
        scores = tl.dot(key, tl.trans(own)) * factor
        shares, weights = shares_and_weights(scores, logarithm[None, :], seen, RECTIFIED, MASKED)
        of_value = tl.dot(weights.to(given.dtype), given, of_value)
        of_weights = tl.dot(value, tl.trans(given))
        gradients = gradients_of_scores(shares, weights, of_weights, delta[None, :], RECTIFIED)
        of_key = tl.dot(gradients.to(own.dtype), own, of_key)
    return of_key, of_value


@triton.jit
def keys_kernel(
    tensors,
    results,
    sight,
    strides,
    sizes,
    factor,
    scaling,
    RECTIFIED: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTHS: tl.constexpr,
    QUERIES: tl.constexpr,
    GRADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """The gradients of a block of keys and values, from all query heads of their head."""
    heads, key_heads, tokens, length = sizes
    row = (tl.program_id(1) // key_heads).to(tl.int64)
    key_head = tl.program_id(1) % key_heads
    start = tl.program_id(0) * KEYS[0]
    full, some, sees = sight_of_block(
        sight, row, start, length, tokens, WHOLE, True, KEYS[0], QUERIES[0]
    )
    at = head_of(tensors[1], strides[1], row, key_head)
    key = load_rows(at, strides[1][1], start, length, WIDTHS[0], KEYS, True)
    at = head_of(tensors[2], strides[2], row, key_head)
    value = load_rows(at, strides[2][1], start, length, WIDTHS[1], VALUES, True)
    found = (zeros(KEYS), zeros(VALUES))
    steps = (strides[0][1], heads * WIDTHS[1])
    for member in range(heads // key_heads):
        head = key_head * (heads // key_heads) + member
        query = head_of(tensors[0], strides[0], row, head)
        grad = tensors[3] + (row * tokens * heads + head) * WIDTHS[1]
        offset = (row * heads + head) * tokens
        known = (tensors[4] + offset, tensors[5] + offset)
        for masked in tl.static_range(2):
            given = (found, query, grad, known, key, value, steps, full, some, sees, tokens, factor)
            found = _add_queries(*given, RECTIFIED, masked == 1, WIDTHS, QUERIES, GRADS)
    at = row * length * key_heads + key_head
    strides = (key_heads * WIDTHS[0], key_heads * WIDTHS[1])
    of_key = results[0] + at * WIDTHS[0]
    store_rows(of_key, strides[0], start, length, found[0] * scaling, WIDTHS[0], KEYS)
    of_value = results[1] + at * WIDTHS[1]
    store_rows(of_value, strides[1], start, length, found[1], WIDTHS[1], VALUES)


@triton.jit
def _add_keys(
    of_query,
    query,
    grad,
    statistics,
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
    """Adds what keys give to the gradients of a block of queries."""
    for index in range(steps_of(full, some, MASKED, KEYS[0])):
        start = step_of(index, full, some, MASKED, KEYS[0])
        own = load_rows(key, strides[0], start, length, WIDTHS[0], KEYS, MASKED)
        given = load_rows(value, strides[1], start, length, WIDTHS[1], VALUES, MASKED)
        place = start + tl.arange(0, KEYS[0])
        seen = (place[None, :] >= sees[0][:, None]) & (place[None, :] < sees[1][:, None])
        scores = tl.dot(query, tl.trans(own)) * factor
        of_weights = tl.dot(grad, tl.trans(given))
        shares, weights = shares_and_weights(
            scores, statistics[0][:, None], seen, RECTIFIED, MASKED
        )
        delta = statistics[1][:, None]
        gradients = gradients_of_scores(shares, weights, of_weights, delta, RECTIFIED)
        of_query = tl.dot(gradients.to(own.dtype), own, of_query)
    return of_query


@triton.jit
def queries_kernel(
    tensors,
    results,
    sight,
    strides,
    sizes,
    factor,
    scaling,
    RECTIFIED: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTHS: tl.constexpr,
    QUERIES: tl.constexpr,
    GRADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """The gradients of a block of queries of one head."""
    heads, key_heads, tokens, length = sizes
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    key_head = head // (heads // key_heads)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES[0]
    full, some, sees = sight_of_block(
        sight, row, start, tokens, length, WHOLE, False, QUERIES[0], KEYS[0]
    )
    at = head_of(tensors[0], strides[0], row, head)
    query = load_rows(at, strides[0][1], start, tokens, WIDTHS[0], QUERIES, True)
    at = tensors[3] + (row * tokens * heads + head) * WIDTHS[1]
    grad = load_rows(at, heads * WIDTHS[1], start, tokens, WIDTHS[1], GRADS, True)
    key = head_of(tensors[1], strides[1], row, key_head)
    value = head_of(tensors[2], strides[2], row, key_head)
    steps = (strides[1][1], strides[2][1])
    place = start + tl.arange(0, QUERIES[0])
    offset = (row * heads + head) * tokens + place
    logarithm = tl.load(tensors[4] + offset, mask=place < tokens, other=0.0) * LOG2_E
    known = (logarithm, tl.load(tensors[5] + offset, mask=place < tokens, other=0.0))
    found = zeros(QUERIES)
    for masked in tl.static_range(2):
        given = (found, query, grad, known, key, value, steps, full, some, sees, length, factor)
        found = _add_keys(*given, RECTIFIED, masked == 1, WIDTHS, KEYS, VALUES)
    at = results[0] + (row * tokens * heads + head) * WIDTHS[0]
    stride = heads * WIDTHS[0]
    store_rows(at, stride, start, tokens, found * scaling, WIDTHS[0], QUERIES)
