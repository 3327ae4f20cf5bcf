"""What the Triton kernels of softpick share: rows of a block, who sees whom, and gradients.

SIZES are the widths of keys and of values, both padded to powers of two, the rows of a block and
the rows that it is compared with at a time.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(
    tensor, stride, start, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr
):
    """Loads rows from `start` on: [rows, columns] of BLOCK, with zeros beyond the WIDTH.

    If it is CHECKED, there are zeros beyond the `length` too; else all rows must be there.
    """
    rows = start + tl.arange(0, BLOCK[0])
    columns = tl.arange(0, BLOCK[1])
    places = tensor + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if CHECKED:
        inside = (rows < length)[:, None] & (columns < WIDTH)[None, :]
        found = tl.load(places, mask=inside, other=0.0)
    elif BLOCK[1] == WIDTH:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=(columns < WIDTH)[None, :], other=0.0)
    return found


@triton.jit
def head_of(tensor, strides, row, head):
    """Where a head of a row begins in a tensor of these strides of rows, tokens and heads."""
    return tensor + row * strides[0] + head * strides[2]


@triton.jit
def zeros(BLOCK: tl.constexpr):
    """A block of float32 zeros."""
    ROWS: tl.constexpr = BLOCK[0]
    COLUMNS: tl.constexpr = BLOCK[1]
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def store_rows(tensor, stride, start, length, found, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Stores rows from `start` on, without what is beyond the `length` and the WIDTH."""
    rows = start + tl.arange(0, BLOCK[0])
    columns = tl.arange(0, BLOCK[1])
    places = tensor + rows[:, None].to(tl.int64) * stride + columns[None, :]
    inside = (rows < length)[:, None] & (columns < WIDTH)[None, :]
    tl.store(places, found.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def sight_of_block(
    sight,
    row,
    start,
    tokens,
    others,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """What the tokens of a block from `start` on see, or with KEYS what sees them.

    These are the first and the stop of the steps of others that all of the tokens see, perhaps
    none; then, of those that some see, the first, the number of steps before the others, and that
    of all; and the first and the stop of each token. WHOLE says that each row is one document
    without a window; else `sight` has the intervals of all `tokens` of each `row`. A row has as
    many `others`.
    """
    place = start + tl.arange(0, BLOCK)
    last = tl.minimum(start + BLOCK, tokens) - 1
    if WHOLE and KEYS:
        low = place
        high = tl.zeros([BLOCK], tl.int32) + others
        first = start // STEP * STEP
        first_full = tl.cdiv(last, STEP) * STEP
        stop_full = others // STEP * STEP
        stop = others
    elif WHOLE:
        low = tl.zeros([BLOCK], tl.int32)
        high = place + 1
        first = start * 0
        first_full = first
        stop_full = start // STEP * STEP
        stop = last + 1
    else:
        lows = sight[0] + row * tokens
        highs = sight[1] + row * tokens
        low = tl.load(lows + place, mask=place < tokens, other=0)
        high = tl.load(highs + place, mask=place < tokens, other=0)
        first = tl.load(lows + start) // STEP * STEP
        first_full = tl.cdiv(tl.load(lows + last), STEP) * STEP
        stop_full = tl.load(highs + start) // STEP * STEP
        stop = tl.load(highs + last)
    before = tl.cdiv(tl.minimum(first_full, stop) - first, STEP)
    after = tl.cdiv(tl.maximum(stop - tl.maximum(first_full, stop_full), 0), STEP)
    return (first_full, stop_full), (first, before, before + after), (low, high)


@triton.jit
def step_of(index, full, some, MASKED: tl.constexpr, STEP: tl.constexpr):
    """Where a step begins: of those that all see, or if it is MASKED of those that some see."""
    start = full[0] + index * STEP
    if MASKED:
        beyond = tl.maximum(full[0], full[1]) + (index - some[1]) * STEP
        start = tl.where(index < some[1], some[0] + index * STEP, beyond)
    return start


@triton.jit
def steps_of(full, some, MASKED: tl.constexpr, STEP: tl.constexpr):
    """The number of steps of others that all see, or if they are MASKED of those that some see."""
    count = some[2]
    if not MASKED:
        count = tl.maximum(full[1] - full[0], 0) // STEP
    return count


@triton.jit
def shares_and_weights(scores, logarithm, seen, RECTIFIED: tl.constexpr, MASKED: tl.constexpr):
    """The shares e^x / D of keys in the denominator, and their weights.

    `scores` are powers of two, and so is `logarithm`, that of the denominator.
    """
    shares = tl.exp2(scores - logarithm)
    if RECTIFIED:  # without any key that has weight, whatever side of 0 a score is rounded to
        shares = tl.where(logarithm > -float("inf"), shares, 0.0)
    if MASKED:
        shares = tl.where(seen, shares, 0.0)
    if RECTIFIED:
        weights = tl.where(scores >= 0, shares, 0.0)
    else:
        weights = tl.maximum(shares - tl.exp2(-logarithm), 0.0)
    return shares, weights


@triton.jit
def gradients_of_scores(shares, weights, of_weights, delta, RECTIFIED: tl.constexpr):
    """The gradients of scores; `delta` is the product of the output and its gradient.

    Only positive scores have weight, so that softpick's need not be kept.
    """
    if RECTIFIED:
        gradients = weights * (of_weights - delta)
    else:
        gradients = shares * tl.where(weights > 0, of_weights - delta, delta)
    return gradients


@triton.jit
def interval_kernel(
    bounds,
    sight,
    sizes,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    KEYS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds which keys of its row each query sees, or with KEYS which queries see each key.

    `bounds` are those of the tokens and of the others, and `sizes` the number of pieces, of all
    tokens, and of the tokens and of the others in a row.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < sizes[1]
    # The last piece that begins at the token or before it, by halving.
    piece = tl.zeros([BLOCK], tl.int32)
    beyond = piece + sizes[0]
    for _ in tl.static_range(STEPS):
        middle = (piece + beyond) // 2
        begins = tl.load(bounds[0] + middle, mask=inside, other=0) <= token
        piece = tl.where(begins, middle, piece)
        beyond = tl.where(begins, beyond, middle)
    left = tl.load(bounds[0] + piece + 1, mask=inside, other=0) - token
    begin = tl.load(bounds[1] + piece, mask=inside, other=0)
    end = tl.load(bounds[1] + piece + 1, mask=inside, other=0)
    first = begin
    stop = end
    if KEYS and CAUSAL:
        first = tl.maximum(begin, end - left)
    if KEYS and WINDOWED:
        stop = tl.maximum(tl.minimum(end, end - left + window), first)
    if not KEYS and CAUSAL:
        stop = tl.maximum(end - left + 1, begin)
    if not KEYS and WINDOWED:
        first = tl.minimum(tl.maximum(begin, end - left - window + 1), stop)
    offset = token // sizes[2] * sizes[3]
    tl.store(sight[0] + token, first - offset, mask=inside)
    tl.store(sight[1] + token, stop - offset, mask=inside)


@triton.jit
def delta_kernel(
    output,
    grad,
    delta,
    heads,
    tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The product of each query's output with its gradient: float32 [B, heads, T]."""
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    start = tl.program_id(0) * BLOCK[0]
    place = start + tl.arange(0, BLOCK[0])
    offset = (row * tokens * heads + head) * WIDTH
    made = load_rows(output + offset, heads * WIDTH, start, tokens, WIDTH, BLOCK, True)
    given = load_rows(grad + offset, heads * WIDTH, start, tokens, WIDTH, BLOCK, True)
    found = tl.sum(made.to(tl.float32) * given.to(tl.float32), 1)
    tl.store(delta + (row * heads + head) * tokens + place, found, mask=place < tokens)
