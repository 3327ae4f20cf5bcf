"""The kernel attends as torch does, whatever lies beyond the end, and writes new tokens."""

# ruff: noqa: E402

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

# The variable must be there before anything imports Triton.
if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs triton and TRITON_INTERPRET=1", allow_module_level=True)

import fla_on_cpu

fla_on_cpu.interpret()

from lacuna.rollout.decode_attention import SMALL, plain_attention
from lacuna.rollout.decode_kernel import attend_in_kernel

ROWS = 6
PAGES = 4
# Heads, key heads, width of heads, tokens of a page, window, splits.
CASES = [
    (4, 2, 64, 16, 0, 1),
    (4, 2, 64, 16, 0, 4),
    (8, 1, 80, 16, 0, 2),
    (6, 2, 96, 32, 0, 8),
    (3, 3, 112, 16, 0, 2),
    (32, 1, 128, 64, 0, 2),
    (4, 4, 128, 64, 20, 2),
    (4, 2, 256, 16, 5, 4),
    (4, 4, 64, 16, 1, 2),
    (4, 2, 64, 16, 16, 1),
    (4, 2, 512, 64, 40, 2),
]


@pytest.mark.parametrize("stored", [None, SMALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_attends_as_torch_does(
    case: tuple[int, ...], dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    heads, key_heads, width, size, window, splits = case
    torch.manual_seed(0)
    positions = torch.tensor([0, 3, size - 1, size, 2 * size, PAGES * size - 1])
    count = 1 + ROWS * PAGES
    table = (torch.randperm(count - 1) + 1).view(ROWS, PAGES).int()
    keys, values = torch.randn(2, count, key_heads, size, width).to(stored or dtype)
    scales = torch.rand(2, count, key_heads, size) if stored else None
    written = torch.zeros(count, size, dtype=torch.bool)
    for row, position in enumerate(positions.tolist()):
        for place in range(position):
            written[table[row, place // size], place % size] = True
    beyond = ~written[:, None, :, None]
    query = torch.randn(ROWS, heads, width, dtype=dtype)
    key = torch.randn(ROWS, key_heads, width, dtype=dtype)
    value = torch.randn(ROWS, 2, key_heads, width, dtype=dtype)[:, 1]  # a part of what is wider
    known = (table, positions, width**-0.5, window)

    def pages_beyond(number: float) -> list[Tensor | None]:
        filled = [each.to(dtype).masked_fill(beyond, number) for each in (keys, values)]
        scaled = None if scales is None else scales.masked_fill(~written[:, None], number)
        return [*(each.to(stored or dtype) for each in filled), scaled]

    plain, ours = pages_beyond(0.0), pages_beyond(torch.nan)
    wanted = plain_attention(query, key, value, *plain, *known)
    found = attend_in_kernel(query, key, value, *ours, *known, splits=splits)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    assert torch.allclose(found, wanted, atol=tolerance, rtol=tolerance)
    for one, other in zip(ours, plain, strict=True):
        if one is not None and other is not None:
            assert torch.equal(one.float().nan_to_num(), other.float())


def test_the_kernels_compile_for_a_gpu() -> None:
    """In a process of its own, where Triton compiles. No GPU is needed for that."""
    variables = {name: one for name, one in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = Path(__file__).parent.parent / "kernels_for_gpus.py"
    subprocess.run([sys.executable, str(program)], env=variables, check=True)
