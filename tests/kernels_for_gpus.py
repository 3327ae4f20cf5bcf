"""Compiles the kernels of decode attention for an H100, which need not be there."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lacuna.rollout import decode_kernel

# Bytes of shared memory that a program may have on an A100; an H100 has more.
LIMIT = 163 * 1024
# Width of heads, heads that share a key, window, splits, element type, and that of pages.
CASES = [
    (128, 2, 0, 1, "bf16", "bf16"),
    (80, 1, 8, 4, "bf16", "bf16"),
    (256, 8, 0, 2, "bf16", "bf16"),
    (512, 8, 0, 2, "bf16", "bf16"),
    (128, 2, 0, 1, "fp32", "fp32"),
    (256, 8, 0, 2, "fp32", "fp32"),
    (512, 2, 0, 4, "fp32", "fp32"),
    (128, 2, 0, 1, "bf16", "fp8e4nv"),
    (80, 1, 8, 4, "bf16", "fp8e4nv"),
    (512, 8, 0, 2, "bf16", "fp8e4nv"),
    (512, 2, 0, 4, "fp32", "fp8e4nv"),
]
BYTES = {"bf16": 2, "fp32": 4}


def main() -> None:
    """Raises an error where a kernel does not compile, or takes too much shared memory."""
    for width, group, window, splits, element, stored in CASES:
        found = "*fp32" if splits > 1 else f"*{element}"
        types = dict.fromkeys(("query", "key", "value"), f"*{element}")
        types |= dict.fromkeys(("keys", "values"), f"*{stored}") | {"output": found, "lse": found}
        scales = "*fp32" if stored != element else f"*{stored}"
        types |= dict.fromkeys(("key_scales", "value_scales"), scales)
        types |= dict.fromkeys(("value_of_row", "pages_of_row"), "i32")
        types |= {"pages": "*i32", "positions": "*i64", "scale": "fp32"}
        padded = triton.next_power_of_2(width)
        fixed = {"WINDOW": window, "GROUP": group, "QUERIES": 16, "WIDTH": width, "PADDED": padded}
        fixed |= {"SIZE": 64, "TILE": decode_kernel.tile_of_page(64, padded, BYTES[element])}
        attending = (decode_kernel._attend, types, fixed | {"SPLITS": splits})
        sizes = {"WIDTH": width, "PADDED": padded, "SPLITS": splits}
        merged = {"parts": "*fp32", "lse": "*fp32", "output": f"*{element}"}
        for kernel, arguments, constants in (attending, (decode_kernel._merge, merged, sizes)):
            signature = arguments | dict.fromkeys(constants, "constexpr")
            places = {(kernel.arg_names.index(name),): one for name, one in constants.items()}
            source = ASTSource(kernel, signature, places)
            warps = 2 if stored == "fp8e4nv" and padded <= 128 else 4
            options = {"num_stages": 2 if padded > 128 else 3, "num_warps": warps}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert compiled.asm["ptx"]
            assert compiled.metadata.shared <= LIMIT, (width, stored, compiled.metadata.shared)
            print(width, stored, kernel.__name__, compiled.metadata.shared)


if __name__ == "__main__":
    main()
