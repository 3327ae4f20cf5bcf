"""Numbers as 8-bit codes of unequal steps, with a scale for each block of a row."""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_FRACTION = 2.0**-149  # the smallest number above 0: scales of zeros divide by it
_LEFT_OUT = 16  # low bits of a float32: numbers that differ in these alone share a bucket
_LOWEST = (127 - 22) << 7  # the bucket of 2^-22, in which all that is nearer to 0 is counted too
_HIGHEST = 127 << 7  # the bucket of 1


class Codes(NamedTuple):
    """What 8-bit codes stand for.

    Attributes:
        numbers: all of them, ascending, float32 [256].
        zero: the place of 0 among them, whose code is 0.
        bounds: the largest value that has each code, float32 [256]; infinity for the last.
        starts: the lowest place that numbers of a bucket have, uint8; first the buckets of
            numbers from 0 up, then those of numbers below 0.
    """

    numbers: Tensor
    zero: int
    bounds: Tensor
    starts: Tensor


def dynamic_codes(signed: bool, device: torch.device | None = None) -> Codes:
    """Codes of which seven powers of ten have a part each, the larger with finer steps; up to 1.

    That is the dynamic tree quantisation of arXiv 2110.02861, except that only 0 has the code of 0
    where all are positive: updates are divided by their roots.
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent * (1 if signed else 2) + 1, dtype=torch.float64)
        means = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
        numbers += means
        if signed:
            numbers += [-mean for mean in means]
    numbers.sort()
    bounds = [(lower + upper) / 2 for lower, upper in pairwise(numbers)]
    if not signed:
        bounds[0] = 0.0
    ends = torch.tensor([*bounds, math.inf])
    found = torch.tensor(numbers, device=device)
    return Codes(found, numbers.index(0.0), ends.to(device), _starts(ends).to(device))


def _starts(bounds: Tensor) -> Tensor:
    """The lowest place of the numbers of each bucket: that of its end towards minus infinity."""
    buckets = torch.arange(_LOWEST, _HIGHEST + 2, dtype=torch.int32)
    edges = (buckets << _LEFT_OUT).view(torch.float32)
    edges[0] = 0.0
    positive = torch.bucketize(edges[:-1], bounds)
    negative = torch.bucketize(-edges[1:], bounds, right=True)  # this end is not in the bucket
    return torch.cat([positive, negative]).to(torch.uint8)


def quantised(values: Tensor, block: int, codes: Codes) -> tuple[Tensor, Tensor]:
    """The codes of float32 values [..., n], uint8, and scales [..., n / block], float32."""
    blocks = values.unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1)
    places = nearest_places(blocks / scales.clamp(min=_FRACTION)[..., None], codes)
    return ((places - codes.zero) % 256).to(torch.uint8).flatten(-2), scales


def nearest_places(values: Tensor, codes: Codes) -> Tensor:
    """The places of the codes of float32 values of at most 1, int32 of the same shape.

    No bucket has more than one bound in it, so that one comparison settles what the first 16 bits
    of a value leave open. A search among all bounds takes eight loads on a GPU.
    """
    bucket = (values.abs().view(torch.int32) >> _LEFT_OUT).clamp(_LOWEST, _HIGHEST) - _LOWEST
    below = (values < 0).int() * (_HIGHEST + 1 - _LOWEST)
    places = codes.starts[bucket + below].int()
    return places + (values > codes.bounds[places]).int()


def dequantised(kept: Tensor, scales: Tensor, codes: Codes) -> Tensor:
    """The values, float32 [..., n], of what is kept [..., n] with scales [..., blocks]."""
    places = (kept.int() + codes.zero) % 256
    blocks: Tensor = codes.numbers[places].unflatten(-1, (scales.shape[-1], -1))
    return (blocks * scales[..., None]).flatten(-2)
