"""Weights in 4 or 8 bits, in bitsandbytes' forms, each packed as one tensor of bytes.

In nf4 a weight is one of 16 levels, with a scale for every 64 weights; a scale is itself one of 256
levels, with a scale for every 256 of them. That makes 4.13 bits a weight. In int8 a weight is one
of 255 levels, with a scale for every row. A packed weight is one tensor [n] of bytes, with its
scales in front, so that they are sharded, gathered and moved with it.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

# The number of weights that share a scale, and of scales that share a scale of their own.
BLOCK = 64
GROUP = 256
# Quantiles of a normal distribution, scaled to [-1, 1] (arXiv 2305.14314, appendix E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@cache
def _code_values(bits: int, device: torch.device) -> Tensor:
    """The values that codes of so many bits stand for, in ascending order, float32.

    Values of 8 bits have a power of ten as their exponent, and the more digits the larger they are
    (arXiv 1511.04561).
    """
    if bits == 4:
        return torch.tensor(_NF4, device=device)
    edges = [torch.linspace(0.1, 1, 2**digits + 1) for digits in range(7)]
    positive = torch.cat(
        [(edge[1:] + edge[:-1]) / 2 * 10.0 ** (place - 6) for place, edge in enumerate(edges)]
    )
    return torch.cat([-positive, positive, torch.tensor([0.0, 1.0])]).sort().values.to(device)


def _quantize_blocks(values: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor]:
    """The codes of `values` [n] in so many bits, and the scale of each block of `size` values."""
    levels = _code_values(bits, values.device)
    edges = (levels[1:] + levels[:-1]) / 2
    codes = []
    scales = []
    for some in values.split(2**24):  # all of a large weight in float32 would fill the memory
        blocks = nn.functional.pad(some.float(), (0, -len(some) % size)).view(-1, size)
        scales.append(blocks.abs().amax(1))
        relative = blocks / scales[-1].clamp(min=1e-38)[:, None]
        codes.append(torch.bucketize(relative, edges, out_int32=True).to(torch.uint8))
    return torch.cat(codes).flatten()[: len(values)], torch.cat(scales)


def packed_sizes(form: str, shape: Sequence[int]) -> list[int]:
    """How many bytes each part of a packed weight of this shape takes.

    The parts are the float32 scales, the codes of scales (in nf4 only), the codes of weights, and a
    filling that makes the sum a multiple of 4.
    """
    count = shape[0] * shape[1]
    if form == "int8":
        sizes = [4 * shape[0], count]
    else:
        blocks = -(-count // BLOCK)
        groups = -(-blocks // GROUP)
        sizes = [4 * (groups + 1), blocks, -(-count // 2)]
    return [*sizes, -sum(sizes) % 4]


def quantize(weight: Tensor, form: str) -> Tensor:
    """Packs a weight [rows, columns] in nf4 or int8: uint8 [sum of `packed_sizes`]."""
    weight = weight.detach()
    if form == "int8":
        values = weight.float()
        scales = values.abs().amax(1)
        codes = (values * (127 / scales.clamp(min=1e-38))[:, None]).round_().to(torch.int8)
        return join_packed(scales, codes)
    codes, scales = _quantize_blocks(weight.flatten(), BLOCK, bits=4)
    codes = nn.functional.pad(codes, (0, len(codes) % 2))
    offset = scales.mean()[None]
    coded, groups = _quantize_blocks(scales - offset, GROUP, bits=8)
    return join_packed(groups, offset, coded, codes[::2] << 4 | codes[1::2])


def join_packed(*parts: Tensor) -> Tensor:
    """Makes a packed weight of its parts, with the filling behind them."""
    whole = torch.cat([part.flatten().view(torch.uint8) for part in parts])
    return nn.functional.pad(whole, (0, -len(whole) % 4))


def dequantize(packed: Tensor, form: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Unpacks a weight of this shape from its form; on a GPU by bitsandbytes' kernels."""
    parts: list[Tensor] = [*packed.view(torch.uint8).split(packed_sizes(form, shape))]
    if form == "int8":
        scales, codes, _ = parts
        factors = scales.view(torch.float32) / 127
        return (codes.view(torch.int8).view(*shape) * factors[:, None]).to(dtype)
    scales, coded_scales, codes, _ = parts
    scales = scales.view(torch.float32)
    groups, offset = scales[:-1], scales[-1]
    levels = _code_values(8, packed.device)
    if packed.is_cuda:
        import bitsandbytes  # noqa: F401  # which takes seconds, and adds to torch.ops

        kernels = torch.ops.bitsandbytes
        scales = kernels.dequantize_blockwise(coded_scales, groups, levels, GROUP, torch.float32)
        weight: Tensor = kernels.dequantize_4bit(codes, scales + offset, BLOCK, "nf4", shape, dtype)
        return weight
    count = shape[0] * shape[1]
    group_of_each = groups.repeat_interleave(GROUP)[: len(coded_scales)]
    scales = levels[coded_scales.int()] * group_of_each + offset
    both = torch.stack([codes >> 4, codes & 15], dim=1).flatten()[:count]
    values = _code_values(4, packed.device)[both.int()]
    return (values * scales.repeat_interleave(BLOCK)[:count]).view(*shape).to(dtype)


def quantize_stack(stack: Tensor, form: str) -> Tensor:
    """Packs each of the matrices of a stack [E, rows, columns] by itself: uint8 [E, bytes]."""
    size = sum(packed_sizes(form, stack.shape[1:]))
    packed = torch.empty(len(stack), size, dtype=torch.uint8, device=stack.device)
    for place, matrix in zip(packed, stack, strict=True):
        place.copy_(quantize(matrix, form))
    return packed


def dequantize_stack(packed: Tensor, form: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Unpacks a stack of matrices of this shape, each packed by itself in a row of `packed`."""
    count = shape[0] * shape[1]
    if form == "nf4" and packed.is_cuda and count % BLOCK == 0:
        return _dequantize_blocks_of_all(packed, shape, dtype)
    stack = torch.empty(len(packed), *shape, dtype=dtype, device=packed.device)
    for place, matrix in zip(stack, packed, strict=True):
        place.copy_(dequantize(matrix, form, shape, dtype))
    return stack


def _dequantize_blocks_of_all(packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Unpacks a stack from nf4 by a few kernels for all of its matrices, whose blocks are whole."""
    import bitsandbytes  # noqa: F401  # which adds to torch.ops

    sizes = packed_sizes("nf4", shape)
    scales, coded_scales, codes, _ = packed.view(torch.uint8).split(sizes, dim=1)
    scales = scales.contiguous().view(torch.float32)
    groups, offset = scales[:, :-1], scales[:, -1:]
    group_of_each = groups.repeat_interleave(GROUP, dim=1)[:, : coded_scales.shape[1]]
    scales = _code_values(8, packed.device)[coded_scales.int()] * group_of_each + offset
    stack = torch.empty(len(packed), *shape, dtype=dtype, device=packed.device)
    at_once = max(1, (2**31 - 1) // (shape[0] * shape[1]))  # the kernel counts weights in 32 bits
    parts = (one.split(at_once) for one in (codes.contiguous(), scales, stack))
    for some_codes, some_scales, some in zip(*parts, strict=True):
        torch.ops.bitsandbytes.dequantize_4bit.out(
            some_codes, some_scales.flatten(), BLOCK, "nf4", some.shape, dtype, out=some
        )
    return stack
