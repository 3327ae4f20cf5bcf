"""Numbers as 8-bit codes of unequal steps, with a scale for each block of a row."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_FRACTION = 2.0**-149  # the smallest number above 0: scales of zeros divide by it


class Codes(NamedTuple):
    """What 8-bit codes stand for.

    Attributes:
        numbers: all of them, ascending, float32 [256].
        zero: the place of 0 among them, whose code is 0.
        bounds: the largest value that has each code but the last, float32 [255].
    """

    numbers: Tensor
    zero: int
    bounds: Tensor


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
    found, ends = (torch.tensor(values, device=device) for values in (numbers, bounds))
    return Codes(found, numbers.index(0.0), ends)


def quantised(values: Tensor, block: int, codes: Codes) -> tuple[Tensor, Tensor]:
    """The codes of float32 values [..., n], uint8, and scales [..., n / block], float32."""
    blocks = values.unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1)
    places = torch.bucketize(blocks / scales.clamp(min=_FRACTION)[..., None], codes.bounds)
    return ((places - codes.zero) % 256).to(torch.uint8).flatten(-2), scales


def dequantised(kept: Tensor, scales: Tensor, codes: Codes) -> Tensor:
    """The values, float32 [..., n], of what is kept [..., n] with scales [..., blocks]."""
    places = (kept.int() + codes.zero) % 256
    blocks: Tensor = codes.numbers[places].unflatten(-1, (scales.shape[-1], -1))
    return (blocks * scales[..., None]).flatten(-2)
