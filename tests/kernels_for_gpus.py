"""Compiles the kernels of decode attention for an H100, which need not be there."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lacuna.rollout import decode_kernel

# Bytes of shared memory that a program may have on an A100; an H100 has more.
LIMIT = 163 * 1024
# Width of heads, heads that share a key, window, splits, element type and its bytes.
CASES = [
    (128, 2, 0, 1, "bf16", 2),
    (80, 1, 8, 4, "bf16", 2),
    (256, 8, 0, 2, "bf16", 2),
    (512, 8, 0, 2, "bf16", 2),
    (128, 2, 0, 1, "fp32", 4),
    (256, 8, 0, 2, "fp32", 4),
    (512, 2, 0, 4, "fp32", 4),
]


def main() -> None:
    """Raises an error where a kernel does not compile, or takes too much shared memory."""
    tensors = ("query", "key", "value", "keys", "values")
    for width, group, window, splits, element, element_size in CASES:
        found = "*fp32" if splits > 1 else f"*{element}"
        types = dict.fromkeys(tensors, f"*{element}") | {"output": found, "lse": found}
        types |= dict.fromkeys(("value_of_row", "pages_of_row"), "i32")
        types |= {"pages": "*i32", "positions": "*i64", "scale": "fp32"}
        padded = triton.next_power_of_2(width)
        fixed = {"WINDOW": window, "GROUP": group, "QUERIES": 16, "WIDTH": width, "PADDED": padded}
        fixed |= {"SIZE": 64, "TILE": decode_kernel.tile_of_page(64, padded, element_size)}
        attending = (decode_kernel._attend, types, fixed | {"SPLITS": splits})
        sizes = {"WIDTH": width, "PADDED": padded, "SPLITS": splits}
        merged = {"parts": "*fp32", "lse": "*fp32", "output": f"*{element}"}
        for kernel, arguments, constants in (attending, (decode_kernel._merge, merged, sizes)):
            signature = arguments | dict.fromkeys(constants, "constexpr")
            places = {(kernel.arg_names.index(name),): one for name, one in constants.items()}
            source = ASTSource(kernel, signature, places)
            options = {"num_stages": 2 if padded > 128 else 3}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert compiled.asm["ptx"]
            assert compiled.metadata.shared <= LIMIT, (width, element, compiled.metadata.shared)
            print(width, element, kernel.__name__, compiled.metadata.shared)


if __name__ == "__main__":
    main()
