"""Times lacuna's loss, and layers as the compiler makes them, beside kernels of other packages.

    python benchmarks/layer_kernels.py                # on a GPU: two tables, and JSON with --json
    python benchmarks/layer_kernels.py --tiny         # on a CPU, for tests

The packages are Liger (liger-kernel) and Apple's cut cross-entropy (cut-cross-entropy); what is not
installed is left out. Times are of a forward and a backward pass; memory is what they take beyond
their inputs and gradients. Errors are norms of the gradients' differences from float32 ones over
the norms of these, the largest of all inputs.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from attention_kernels import milliseconds
from torch import Tensor, nn

from lacuna.data.packing import IGNORED
from lacuna.model.head import Head
from lacuna.model.loss import chunked_sums
from lacuna.objective.language_modelling import LanguageModelling

Row = dict[str, Any]
Work = Callable[..., Tensor]
# Tokens, width and vocabulary of the 1B Llama, of Qwen3 0.6B and of the 8B Llama.
LOSSES = {
    "1B": (16_384, 2_048, 128_256),
    "0.6B": (16_384, 1_024, 151_936),
    "8B": (8_192, 4_096, 128_256),
}


def parse(words: list[str]) -> Namespace:
    """The options of the command."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("loss", "layers"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="a file to write the rows to")
    parser.add_argument("--tiny", action="store_true", help="a few tokens, as on a CPU")
    given = parser.parse_args(words)
    if given.tiny:
        given.repeats = 1
    return given


def losses(is_gpu: bool) -> dict[str, Work]:
    """Cross-entropy of hidden states, of a head's weight and of labels, summed over tokens."""

    def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # The weight stays the leaf that gradients are asked of.
        linear = cast(nn.Linear, SimpleNamespace(weight=weight, bias=None))
        head = Head(compiled=is_gpu)
        return chunked_sums(linear, head, LanguageModelling.loss, hidden, {"labels": labels})[0]

    def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    found: dict[str, Work] = {"lacuna": ours, "all logits": whole}
    if not is_gpu:
        return found
    found["all logits"] = torch.compile(whole)
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def liger(accumulated: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = liger_fused_linear_cross_entropy(
                hidden, weight, labels, reduction="sum", accum_dtype=accumulated
            )
            return loss

        found["Liger"] = partial(liger, None)
        found["Liger, float32 sums"] = partial(liger, torch.float32)
    except ImportError as missing:
        print(missing, file=sys.stderr)
    try:
        from cut_cross_entropy import linear_cross_entropy

        def cut(filtered: str | None, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = linear_cross_entropy(
                hidden, weight, labels, reduction="sum", filter_eps=filtered
            )
            return loss

        found["cut cross-entropy"] = partial(cut, "high")
        found["cut cross-entropy, unfiltered"] = partial(cut, None)
    except ImportError as missing:
        print(missing, file=sys.stderr)
    return found


def norm(states: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as transformers' Llama has it."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(states.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The product of a gated feed-forward block."""
    return F.silu(gate) * up


def layers(is_gpu: bool) -> dict[str, dict[str, Work]]:
    """The same parts of a layer by the compiler and by Liger."""
    compiled: Callable[[Work], Work] = torch.compile if is_gpu else lambda work: work
    found: dict[str, dict[str, Work]] = {
        "RMSNorm": {"compiler": compiled(norm)},
        "SwiGLU": {"compiler": compiled(swiglu)},
    }
    if not is_gpu:
        return found
    try:
        from liger_kernel.transformers.functional import liger_rms_norm, liger_swiglu

        found["RMSNorm"]["Liger"] = lambda states, weight: liger_rms_norm(
            states, weight, 1e-6, in_place=False
        )
        found["SwiGLU"]["Liger"] = liger_swiglu
    except ImportError as missing:
        print(missing, file=sys.stderr)
    return found


def measured(work: Work, leaves: list[Tensor], rest: list[Tensor], given: Namespace) -> Row:
    """Milliseconds, GiB and gradients of a forward and a backward pass of `work`."""
    device = leaves[0].device.type
    upstream: list[Tensor] = []

    def both() -> tuple[Tensor, ...]:
        output = work(*leaves, *rest)
        if not upstream:
            upstream.append(torch.ones_like(output))
        return torch.autograd.grad(output, leaves, upstream[0])

    time = milliseconds(both, given.repeats, device)
    memory = 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = both()
        own = sum(one.nbytes for one in gradients)
        memory = (torch.cuda.max_memory_allocated() - before - own) / 2**30
    else:
        gradients = both()
    return {"ms": time, "gib": memory, "gradients": gradients}


def compare(
    works: dict[str, Work], exact: Work, leaves: list[Tensor], rest: list[Tensor], given: Namespace
) -> list[Row]:
    """A row for each of `works`, whose errors are those beside `exact` in float32."""
    wide = [one.detach().float().requires_grad_() for one in leaves]
    output = exact(*wide, *rest)
    wanted = torch.autograd.grad(output, wide, torch.ones_like(output))
    del output
    rows = []
    for name, work in works.items():
        try:
            row = measured(work, leaves, rest, given)
        except Exception as fault:  # whatever other people's kernels may raise
            print(f"{name}: {type(fault).__name__}: {fault}"[:300], file=sys.stderr)
            continue
        pairs = zip(row.pop("gradients"), wanted, strict=True)
        error = max(float((one.float() - right).norm() / right.norm()) for one, right in pairs)
        rows.append({"kernel": name} | row | {"error": error})
    for row in rows:
        row["ratio"] = rows[0]["ms"] / row["ms"]
    return rows


def measure_losses(given: Namespace, device: str, dtype: torch.dtype) -> list[Row]:
    """The rows of all shapes of heads."""
    rows = []
    works = losses(device == "cuda")
    for name, shape in LOSSES.items():
        tokens, width, vocabulary = (48, 16, 80) if given.tiny else shape
        generator = torch.Generator(device).manual_seed(0)
        random = partial(torch.randn, generator=generator, device=device)
        hidden = random(tokens, width).to(dtype).requires_grad_()
        weight = (random(vocabulary, width) * width**-0.5).to(dtype).requires_grad_()
        labels = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
        labels[::7] = IGNORED
        for row in compare(works, losses(False)["lacuna"], [hidden, weight], [labels], given):
            rows.append({"what": f"loss, {name}"} | row)
    return rows


def measure_layers(given: Namespace, device: str, dtype: torch.dtype) -> list[Row]:
    """The rows of the parts of a layer, of 16,384 tokens of the 1B Llama."""
    tokens, width, inner = (8, 16, 32) if given.tiny else (16_384, 2_048, 8_192)
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.randn, generator=generator, device=device)
    sizes = {"RMSNorm": [(tokens, width), (width,)], "SwiGLU": [(tokens, inner), (tokens, inner)]}
    exact: dict[str, Work] = {"RMSNorm": norm, "SwiGLU": swiglu}
    rows = []
    for name, works in layers(device == "cuda").items():
        leaves = [random(*size).to(dtype).requires_grad_() for size in sizes[name]]
        rows += [{"what": name} | row for row in compare(works, exact[name], leaves, [], given)]
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a table; a ratio is the first kernel's time over this one's."""
    lines = ["| what | kernel | ms | ratio | GiB | error |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['what']} | {row['kernel']} | {row['ms']:.3f} | {row['ratio']:.2f} | "
            f"{row['gib']:.2f} | {row['error']:.1e} |"
        )
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Prints what was measured."""
    given = parse(words)
    is_gpu = torch.cuda.is_available() and not given.tiny
    device, dtype = ("cuda", torch.bfloat16) if is_gpu else ("cpu", torch.float32)
    rows = []
    if given.only != "layers":
        rows += measure_losses(given, device, dtype)
    if given.only != "loss":
        rows += measure_layers(given, device, dtype)
    print(table(rows))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
