"""Compiles the kernels of decode attention for an H100, which need not be there."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lacuna.rollout import decode_kernel


def main() -> None:
    """Raises an error where a kernel does not compile."""
    tensors = ("query", "key", "value", "keys", "values")
    for width, group, window, splits in ((128, 2, 0, 1), (80, 1, 8, 4), (256, 8, 0, 2)):
        found = "*fp32" if splits > 1 else "*bf16"
        types = dict.fromkeys(tensors, "*bf16") | {"output": found, "lse": found}
        types |= {"pages": "*i32", "pages_of_row": "i32", "positions": "*i64", "scale": "fp32"}
        padded = triton.next_power_of_2(width)
        fixed = {"WINDOW": window, "GROUP": group, "QUERIES": 16, "WIDTH": width, "PADDED": padded}
        attending = (decode_kernel._attend, types, fixed | {"SIZE": 64, "SPLITS": splits})
        sizes = {"WIDTH": width, "PADDED": padded, "SPLITS": splits}
        merged = {"parts": "*fp32", "lse": "*fp32", "output": "*bf16"}
        for kernel, arguments, constants in (attending, (decode_kernel._merge, merged, sizes)):
            signature = arguments | dict.fromkeys(constants, "constexpr")
            places = {(kernel.arg_names.index(name),): one for name, one in constants.items()}
            source = ASTSource(kernel, signature, places)
            assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


if __name__ == "__main__":
    main()
