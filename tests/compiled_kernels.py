"""Compiles softpick's kernels for an H100 on a machine without a GPU, and prints their names.

Triton's interpreter takes Python that its compiler does not.
"""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from lacuna.model import softpick_kernels
from lacuna.parallel.partial_attention import Part

KERNELS = (
    "forward_kernel",
    "keys_kernel",
    "queries_kernel",
    "interval_kernel",
    "delta_kernel",
)


class Hopper:
    """What Triton asks of a driver before it runs anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


class Compiled:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernel = getattr(softpick_kernels, name)

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            compiled = self.kernel.warmup(*given, grid=grid, **named)
            assert compiled.asm["cubin"]
            print(self.name, compiled.asm["ptx"].count("wgmma.mma_async"))

        return launch


def compile_all(width: int, whole: bool, window: int | None, rectified: bool) -> None:
    """Compiles forward and backward for heads of a width."""
    rows, tokens = 2, 160
    query, output, grad = torch.zeros(3, rows, tokens, 4, width, dtype=torch.bfloat16)
    key, value = torch.zeros(2, rows, tokens, 2, width, dtype=torch.bfloat16)
    bounds = torch.arange(rows + 1, dtype=torch.int32) * tokens
    part = Part(bounds, bounds, tokens, tokens, whole=whole)
    seen = (part, 0.1, window, rectified)
    softpick_kernels.attend(query, key, value, *seen, 1e-6)
    lse = torch.zeros(rows, tokens, 4)
    softpick_kernels.differentiate(grad, output, lse, query, key, value, *seen)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Hopper())
    for name in KERNELS:
        setattr(softpick_kernels, name, Compiled(name))
    compile_all(64, True, None, False)
    compile_all(64, False, 7, True)
    compile_all(128, True, None, False)
