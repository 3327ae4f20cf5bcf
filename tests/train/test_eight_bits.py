"""8-bit codes stand for the nearest numbers that they can."""

import pytest
import torch

from lacuna.train.eight_bits import dequantised, dynamic_codes, nearest_places, quantised


def test_codes_are_spread_over_seven_powers_of_ten() -> None:
    for signed in (True, False):
        numbers, zero, *_ = dynamic_codes(signed)
        assert len(set(numbers.tolist())) == 256
        assert numbers[zero] == 0 and numbers.max() == 1
        assert (numbers.min() < -0.99) == signed
        assert 0 < numbers[numbers > 0].min() < 1e-6


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_code_is_taken_in_every_block(signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 3, 128, generator=generator) * torch.logspace(-12, 3, 15).view(5, 3, 1)
    values[0, 0] = 0
    values = values if signed else values.square()
    codes = dynamic_codes(signed)
    kept, scales = quantised(values, 64, codes)
    assert kept.dtype == torch.uint8 and scales.shape == (5, 3, 2)
    found = dequantised(kept, scales, codes)
    spread = scales.repeat_interleave(64, -1)
    choices = codes.numbers * spread[..., None]
    nearest = (choices - values[..., None]).abs().amin(-1)
    is_nearest = torch.isclose((found - values).abs(), nearest, rtol=1e-4, atol=0)
    least = codes.numbers[codes.zero + 1] * spread
    if signed:
        assert is_nearest.all()
    else:  # what is above 0 stays so: updates are divided by it
        assert (is_nearest | (values > 0) & (values < least) & (found == least)).all()
        assert ((found > 0) == (values > 0)).all()
    assert (kept[0, 0] == 0).all() and (found[0, 0] == 0).all()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_found_by_the_first_bits_are_those_of_a_search(signed: bool) -> None:
    codes = dynamic_codes(signed)
    ends = codes.bounds[:-1]
    beside = [torch.nextafter(ends, ends.new_tensor(to)) for to in (-1.0, 1.0)]
    every = (torch.arange(0, 0x3F80_0001, 997, dtype=torch.int32)).view(torch.float32)
    values = torch.cat([ends, *beside, every, torch.tensor([0.0, 2.0**-149, 1.0])])
    if signed:
        values = torch.cat([values, -values])
    values = values[values.abs() <= 1]
    assert (nearest_places(values, codes) == torch.bucketize(values, ends)).all()
