"""Times softpick's Triton kernels beside FlashAttention in torch, and checks what they compute.

    python benchmarks/attention_kernels.py            # on a GPU: a table, and as JSON with --json
    python benchmarks/attention_kernels.py --tune     # first takes the fastest sizes of blocks
    TRITON_INTERPRET=1 python benchmarks/attention_kernels.py --tiny    # on a CPU, for tests

Errors are norms of differences from float32 over the norm of that, on the heads of one key head of
one row: of bfloat16 inputs and outputs they are between 1e-3 and 1e-2.
"""

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lacuna.model import softpick
from lacuna.model.merged_attention import merged_attention
from lacuna.model.own_attention import register
from lacuna.parallel.partial_attention import Part

WARM_UP = 3
MOST_SUMS = 128  # registers of a thread, of 255, that hold what is summed up
Row = dict[str, Any]


def parse(words: list[str]) -> Namespace:
    """The options of the command."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("softpick", "rectified"), default="softpick")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--documents", type=int, default=1, help="documents of a row, alike long")
    parser.add_argument("--window", type=int, help="keys that a query sees; default: all before it")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tune", action="store_true", help="try other sizes of blocks first")
    parser.add_argument("--json", help="a file to write the rows to")
    parser.add_argument("--tiny", action="store_true", help="a few tokens, as on a CPU")
    given = parser.parse_args(words)
    if given.tiny:
        given.batch, given.heads, given.key_heads, given.tokens = 1, 2, 1, 48
        given.widths, given.repeats = [16], 1
    return given


def inputs(given: Namespace, width: int, device: str) -> list[Tensor]:
    """Query, key, value and the gradient of the output: [batch, tokens, heads, width]."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    heads = (given.heads, given.key_heads, given.key_heads, given.heads)
    return [
        torch.randn(given.batch, given.tokens, count, width, generator=generator, device=device).to(
            dtype
        )
        for count in heads
    ]


def part_of(given: Namespace, rows: int, device: str) -> Part:
    """Rows of documents that are alike long."""
    tokens = given.tokens
    ends = [tokens * number // given.documents for number in range(1, given.documents + 1)]
    bounds = [0] + [row * tokens + end for row in range(rows) for end in ends]
    cu = torch.tensor(bounds, dtype=torch.int32, device=device)
    whole = given.documents == 1
    return Part(cu, cu, tokens if whole else int(cu.diff().max()), tokens, whole=whole)


def milliseconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """The median time of some work."""
    for _ in range(WARM_UP if repeats > 1 else 1):
        work()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def both_passes(
    attend: Callable[..., Tensor], tensors: list[Tensor], repeats: int, device: str
) -> tuple[float, float]:
    """The milliseconds of a forward and of a backward pass."""
    *given, grad = tensors
    leaves = [one.detach().requires_grad_() for one in given]
    forward = milliseconds(lambda: attend(*leaves), repeats, device)
    output = attend(*leaves)
    backward = milliseconds(
        lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True), repeats, device
    )
    return forward, backward


def results(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    *given, grad = tensors
    leaves = [one.detach().requires_grad_() for one in given]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def errors(ours: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The relative error of each tensor."""
    pairs = zip(ours, exact, strict=True)
    return [float((one.float() - right).norm() / right.norm()) for one, right in pairs]


def softmax_by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by torch's function, in the layout of softpick's."""
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2)


@contextmanager
def flash(device: str) -> Iterator[None]:
    """A context in which torch's attention is FlashAttention, which a CPU has for itself."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, *[SDPBackend.MATH][: device == "cpu"]]):
        yield


def flops(given: Namespace, width: int, part: Part) -> float:
    """The FLOPs of the two products of a forward pass, of the pairs that are seen."""
    lengths = part.cu_q.diff().double()
    seen = lengths.clamp(0, given.window)
    pairs = float((lengths * seen - seen * seen / 2).sum())
    return 4.0 * given.heads * width * pairs


def measure(given: Namespace, width: int, device: str) -> list[Row]:
    """The rows of one width of heads: forward and backward."""
    tensors = inputs(given, width, device)
    part = part_of(given, given.batch, device)
    scaling = width**-0.5

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = part if len(query) == given.batch else part_of(given, len(query), device)
        return merged_attention(given.kind, query, key, value, own, scaling, given.window)

    group = given.heads // given.key_heads
    slices = [one[:1, :, : (group if one.shape[2] == given.heads else 1)] for one in tensors]
    wide = [one.float() for one in slices]
    computed = results(ours, slices)
    takes_kernel = softpick._takes_kernel
    softpick._takes_kernel = lambda *_: False
    exact = results(ours, wide)
    softpick._takes_kernel = takes_kernel
    with flash(device):
        beside = both_passes(softmax_by_torch, tensors, given.repeats, device)
        computed_beside = results(softmax_by_torch, slices)
    with sdpa_kernel(SDPBackend.MATH):
        exact_beside = results(softmax_by_torch, wide)
    own_errors = errors(computed, exact)
    flash_errors = errors(computed_beside, exact_beside)
    rows = []
    total = flops(given, width, part)
    own_times = both_passes(ours, tensors, given.repeats, device)
    for number, name in enumerate(("forward", "backward")):
        places = slice(0, 1) if number == 0 else slice(1, 4)
        work = total if number == 0 else 2.5 * total
        rows.append(
            {
                "width": width,
                "pass": name,
                "ms": own_times[number],
                "flash_ms": beside[number],
                "ratio": beside[number] / own_times[number],
                "tflops": work / own_times[number] / 1e9,
                "error": max(own_errors[places]),
                "flash_error": max(flash_errors[places]),
            }
        )
    return rows


def may_fit(name: str, candidate: tuple[int, ...], width: int) -> bool:
    """Whether a kernel of these sizes may fit shared memory and registers, reckoned roughly.

    Triton says so only after it has compiled a kernel, which takes seconds for wide heads.
    """
    block, step, warps, stages = candidate
    kept = block if name == "FORWARD" else 2 * block
    shared_bytes = 2 * width * (kept + 2 * stages * step)
    sums = 2 * block if name == "OF_KEYS" else block
    registers = sums * width / (32 * warps)
    device = torch.cuda.get_device_properties()
    return shared_bytes <= device.shared_memory_per_block_optin and registers <= MOST_SUMS


def tune(given: Namespace, width: int, device: str) -> None:
    """Sets, for this process, the fastest sizes of blocks of each kernel, and prints them."""
    from lacuna.model import softpick_kernels

    tensors = inputs(given, width, device)
    part = part_of(given, given.batch, device)

    def ours(*three: Tensor) -> Tensor:
        return merged_attention(given.kind, *three, part, width**-0.5, given.window)

    tables = {"FORWARD": 0, "OF_KEYS": 1, "OF_QUERIES": 1}
    candidates = [(32, 16, 4, 1), (16, 32, 4, 1)]
    if device == "cuda":
        candidates = [*product((128,), (32, 64, 128), (8,), (2, 3))]
        candidates += product((128, 64), (32, 64), (4,), (2, 3))
        candidates += product((128, 64), (16, 32), (8,), (2,))  # registers hold these of 256
    for name, which in tables.items():
        table = getattr(softpick_kernels, name)
        best = (float("inf"), table[width])
        tried = [one for one in candidates if device == "cpu" or may_fit(name, one, width)]
        for candidate in [table[width], *tried]:
            table[width] = candidate
            try:
                taken = both_passes(ours, tensors, max(given.repeats // 4, 1), device)[which]
            except Exception as fault:  # too much memory or too many registers, by Triton's say
                print(f"  {name} {candidate}: {type(fault).__name__}", file=sys.stderr)
                continue
            best = min(best, (taken, candidate))
        table[width] = best[1]
        print(f"{name}[{width}] = {best[1]}: {best[0]:.3f} ms", flush=True)


def table(rows: list[Row]) -> str:
    """The rows as a table; a ratio above 1 says that softpick is faster."""
    lines = ["| heads of | pass | ms | FlashAttention ms | ratio | TFLOP/s | error | its error |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        lines.append(
            f"| {row['width']} | {row['pass']} | {row['ms']:.3f} | {row['flash_ms']:.3f} | "
            f"{row['ratio']:.2f} | {row['tflops']:.0f} | {row['error']:.1e} | "
            f"{row['flash_error']:.1e} |"
        )
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Prints what was measured; status 1 where an error is too large."""
    given = parse(words)
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    register(given.kind)
    if device == "cuda":
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    rows = []
    for width in given.widths:
        if given.tune:
            tune(given, width, device)
        rows += measure(given, width, device)
    print(table(rows))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)
    return int(any(not row["error"] < 2e-2 for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
