r"""How fast completions come in one process: lacuna's engine beside transformers' own ways.

python benchmarks/generation.py [--tiny] [--case even|uneven|kernel] [--only WAY ...] [--profile]

Weights are random, in bfloat16. `even` has Qwen3 0.6B's shape and 64 sequences of 128 + 512 tokens;
`uneven` that of 1.7B and 256 completions of 8 to 1,024 tokens; `kernel` is decode attention alone.
Of the ways, `engine` has one product for layers that take the same input, and `apart` one for each;
`float8` keeps keys and values in float8.
`static` is `generate` with a static cache, for which it compiles, and `uncompiled` without that;
`recorded` is a plain loop over such a cache with a CUDA graph of its step (not for `uneven`).
Only tokens that were wanted are counted. Each way has a time limit of its own; what it fails with
is printed.
"""

import argparse
import copy
import gc
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from row_models import QWEN3_600M
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    StaticCache,
)
from transformers.generation.continuous_batching.continuous_api import WorkloadHints

from lacuna.model.architecture import decoder_layers
from lacuna.rollout.decode_attention import decode_attention, plain_attention
from lacuna.rollout.drawing import Asked, Completion, Drawing
from lacuna.rollout.engine import complete_in_pages
from lacuna.rollout.joined import joined, of_one_input
from lacuna.rollout.pages import PAGED, SIZE

QWEN3_1700M = QWEN3_600M | {"hidden_size": 2048, "intermediate_size": 6144}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Work:
    """Prompts, and how many tokens are wanted after each."""

    prompts: list[list[int]]
    limits: list[int]


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Within it, TimeoutError is raised after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def make_model(shape: dict[str, Any]) -> PreTrainedModel:
    """A model of random weights in bfloat16."""
    torch.manual_seed(0)
    settings = {name: value for name, value in shape.items() if name != "architectures"}
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(**settings), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def make_work(case: str, vocabulary: int, tiny: bool) -> Work:
    """Random prompts, and the lengths that are wanted."""
    numbers = random.Random(0)
    count, of_prompt, longest = (64, 128, 512) if case == "even" else (256, 128, 1024)
    if tiny:
        count, of_prompt, longest = 6, 12, 16
    lengths = [of_prompt] * count
    limits = [longest] * count
    if case == "uneven":
        lengths = [numbers.randint(8, of_prompt) for _ in range(count)]
        limits = [numbers.randint(8, longest) for _ in range(count)]
    prompts = [[numbers.randrange(1, vocabulary) for _ in range(length)] for length in lengths]
    return Work(prompts, limits)


def by_engine(
    model: PreTrainedModel,
    work: Work,
    graphs: bool,
    compiled: bool,
    joining: bool,
    small: bool,
) -> list[list[Completion]]:
    """What lacuna's engine makes of it, as in a rollout of frozen weights with adapters."""
    asked = [
        Asked(prompt, [number], limit)
        for number, (prompt, limit) in enumerate(zip(work.prompts, work.limits, strict=True))
    ]
    model.set_attn_implementation(PAGED)
    try:
        with torch.no_grad(), joined(model, of_one_input(model, DEVICE) if joining else []):
            rows = len(asked)
            return complete_in_pages(
                model, asked, Drawing(1.0), [], rows, DEVICE, graphs, compiled, small=small
            )
    finally:
        model.set_attn_implementation("sdpa")


def by_generate(model: PreTrainedModel, work: Work, seconds: float, **options: Any) -> int:
    """How many of the wanted tokens transformers' `generate` makes in so many seconds."""
    width = max(map(len, work.prompts))
    padded = [[0] * (width - len(prompt)) + prompt for prompt in work.prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in work.prompts]
    output = model.generate(
        torch.tensor(padded, device=DEVICE),
        attention_mask=torch.tensor(mask, device=DEVICE),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(work.limits),
        max_time=seconds,
        use_cache=True,
        **options,
    )
    made = output.shape[1] - width
    return sum(min(limit, made) for limit in work.limits)


def by_recorded_steps(model: PreTrainedModel, work: Work) -> int:
    """How many tokens a plain loop over transformers' static cache makes, a CUDA graph for a step.

    Prompts have one length.
    """
    most = max(work.limits)
    tokens = torch.tensor(work.prompts, device=DEVICE)
    cache = StaticCache(config=model.config, max_cache_len=tokens.shape[1] + most)

    def drawn(ids: Tensor) -> Tensor:
        logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1].float()
        noise = torch.empty_like(logits).exponential_()
        return (logits - noise.log()).argmax(-1, keepdim=True)

    last = drawn(tokens)

    def step() -> None:
        last.copy_(drawn(last))

    replay = step
    done = 1
    if DEVICE.type == "cuda":
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
        done = 4  # recording computes nothing
    for _ in range(most - done):
        replay()
    assert int(cache.get_seq_length()) == tokens.shape[1] + most - 1, "every step was made"
    return sum(work.limits)


def by_batches(model: PreTrainedModel, work: Work) -> tuple[int, float]:
    """How many tokens transformers' continuous batching makes, and in how many seconds.

    These are counted when its thread has begun.
    """
    settings = GenerationConfig(
        max_new_tokens=max(work.limits), do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    settings.eos_token_id = -1
    settings.pad_token_id = 0
    made = done = 0
    hints = WorkloadHints(max(map(len, work.prompts)), max(work.limits), len(work.prompts))
    with model.continuous_batching_context_manager(
        settings, timeout=5, workload_hints=hints
    ) as manager:
        began = synchronize()
        for prompt, limit in zip(work.prompts, work.limits, strict=True):
            manager.add_request(prompt, max_new_tokens=limit)
        while done < len(work.prompts):
            found = manager.get_result(timeout=1)
            if found is None and not manager.is_running():
                raise RuntimeError("its thread has ended")
            if found is not None and found.is_finished():
                done += 1
                made += len(found.generated_tokens)
        return made, synchronize() - began


def difference(
    model: PreTrainedModel, work: Work, said: list[list[Completion]], dtype: torch.dtype
) -> tuple[float, float]:
    """How log-probabilities differ from those of whole forward passes: mean and largest."""
    apart: list[float] = []
    # A copy: back from bfloat16 the frequencies of positions would be rounded.
    if dtype != model.dtype:
        model = copy.deepcopy(model).to(dtype)
    for prompt, [one] in list(zip(work.prompts, said, strict=True))[:8]:
        ids = torch.tensor([prompt + one.tokens], device=DEVICE)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        wanted = logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        apart += (wanted - torch.tensor(one.logprobs, device=DEVICE)).abs().tolist()
    return statistics.mean(apart), max(apart)


def synchronize() -> float:
    """The time when the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(name: str, limit: int, warm_up: Callable[[], Any], run: Callable[[], Any]) -> Any:
    """Prints what a way makes of the work in a second; its result, or None if it fails."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with limited(limit), torch.no_grad():
            began = synchronize()
            warm_up()
            warm = synchronize() - began
            began = synchronize()
            result = run()
            seconds = synchronize() - began
    except Exception as fault:
        print(f"{name:16} {type(fault).__name__}: {' '.join(str(fault).split())[:300]}", flush=True)
        return None
    made = result
    if isinstance(result, tuple):
        made, seconds = result
    if isinstance(result, list):
        made = sum(len(one.tokens) for group in result for one in group)
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else float("nan")
    print(
        f"{name:16} {made / seconds:>9,.0f} tokens/s  {made:,} in {seconds:6.2f} s  "
        f"warm-up {warm:5.1f} s  peak {peak:5.1f} GiB",
        flush=True,
    )
    return result


def compile_layers(model: PreTrainedModel, **options: Any) -> None:
    """Compiles the layers, as training does."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, **options)


def run_case(case: str, given: argparse.Namespace) -> None:
    """Measures every way of one case."""
    shape = QWEN3_600M if case == "even" else QWEN3_1700M
    if given.tiny:
        shape = shape | SMALL
    work = make_work(case, shape["vocab_size"], given.tiny)
    # Not all at once, where that is so in the work: fewer sequences need steps of their own.
    few = [3, 3, 3, 3, 3, 3, 3, 12, 12, 30] if case == "uneven" else [10]
    short = Work(work.prompts, [few[row % len(few)] for row in range(len(work.prompts))])
    some = Work(work.prompts, [min(32, limit) for limit in work.limits])
    wanted = sum(work.limits)
    print(f"\n{case}: {len(work.prompts)} sequences, {wanted:,} tokens", flush=True)
    ways: dict[str, Callable[[PreTrainedModel], Any]] = {}

    def of_engine(
        name: str, graphs: bool, mode: str | None, joining: bool = True, small: bool = False
    ) -> Callable[[PreTrainedModel], Any]:
        def way(model: PreTrainedModel) -> Any:
            if mode is not None:
                compile_layers(model, **({"mode": mode} if mode else {}))
            settings = {"graphs": graphs, "compiled": mode is not None, "joining": joining}
            settings |= {"small": small}
            said = measure(
                name,
                given.limit,
                lambda: by_engine(model, short, **settings),
                lambda: by_engine(model, work, **settings),
            )
            if said is not None:
                for dtype in (torch.bfloat16, torch.float32):
                    with torch.compiler.set_stance("force_eager"):
                        mean, largest = difference(model, work, said, dtype)
                    print(f"{'':16} from a pass in {dtype}: mean {mean:.4f}, largest {largest:.3f}")
            if given.profile:
                profile(lambda: by_engine(model, some, **settings))
            return said

        return way

    ways["engine"] = of_engine("engine", True, "")
    ways["apart"] = of_engine("apart", True, "", joining=False)
    ways["float8"] = of_engine("float8", True, "", small=True)
    ways["graph"] = of_engine("graph", True, None)
    ways["eager"] = of_engine("eager", False, None)
    ways["autotuned"] = of_engine("autotuned", True, "max-autotune-no-cudagraphs")
    seconds = given.limit / 3

    def of_generate(
        name: str, warm_up_seconds: float, **options: Any
    ) -> Callable[[PreTrainedModel], Any]:
        return lambda model: measure(
            name,
            given.limit,
            lambda: by_generate(model, work, warm_up_seconds, **options),
            lambda: by_generate(model, work, seconds, **options),
        )

    static = {"cache_implementation": "static"}
    ways["static"] = of_generate("static", 10, **static)
    ways["uncompiled"] = of_generate("uncompiled", 0.5, **static, disable_compile=True)
    if case == "even":
        ways["recorded"] = lambda model: measure(
            "recorded",
            given.limit,
            lambda: by_recorded_steps(model, short),
            lambda: by_recorded_steps(model, work),
        )
    ways["plain"] = of_generate("plain", 0.5)
    ways["continuous"] = lambda model: measure(
        "continuous",
        given.limit,
        lambda: by_batches(model, short),
        lambda: by_batches(model, work),
    )
    for name in given.only or [name for name in ways if name != "autotuned"]:
        torch._dynamo.reset()
        ways[name](make_model(shape))


def profile(run: Callable[[], Any]) -> None:
    """Prints the kernels that take longest."""
    with torch.profiler.profile() as found, torch.no_grad():
        run()
    key = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    events = [event for event in found.key_averages() if getattr(event, key) > 0]
    kernels = [one for one in events if "CUDA" in str(one.device_type)] or events
    for one in sorted(kernels, key=lambda each: -getattr(each, key))[:25]:
        print(f"  {getattr(one, key) / 1e3:8.2f} ms {one.count:>6} x {one.key[:90]}", flush=True)


def run_kernel(given: argparse.Namespace) -> None:
    """Compares decode attention with torch's, and prints its share of the memory's speed."""
    print("\nkernel: decode attention, bfloat16, 8 key heads, 16 heads of 128", flush=True)
    for rows, length in ((2, 40), (3, 90)) if given.tiny else ((64, 384), (64, 640), (256, 600)):
        pages = -(-length // SIZE)
        shape = (1 + rows * pages, 8, SIZE, 128)
        options = {"device": DEVICE, "dtype": torch.bfloat16}
        keys, values = torch.randn(shape, **options), torch.randn(shape, **options)
        table = torch.randperm(rows * pages, device=DEVICE).int().view(rows, pages) + 1
        positions = torch.randint(length // 2, length, (rows,), device=DEVICE)
        query = torch.randn(rows, 16, 128, **options)
        key, value = torch.randn(2, rows, 8, 128, **options)
        cached = (keys, values, None, table, positions)
        wanted = plain_attention(query, key, value, *cached, 128**-0.5, 0)
        found = decode_attention(query, key, value, *cached, 128**-0.5, 0)
        apart = (found - wanted).abs().max().item()
        read = 2 * int((positions + 1).sum()) * 8 * 128 * 2
        said = f"{rows} rows to {length}: differs by {apart:.4f}"
        if DEVICE.type != "cuda":
            print(said)
            continue
        from lacuna.rollout import decode_kernel

        for warps, stages in ((4, 3), (4, 5), (2, 3), (2, 5), (8, 3)):
            for splits in (1, 2):
                options = {"splits": splits, "warps": warps, "stages": stages}
                try:
                    took = time_of(
                        decode_kernel.attend_in_kernel, query, key, value, *cached, options
                    )
                except Exception as fault:
                    print(f"{said}, {options}: {type(fault).__name__}: {str(fault)[:100]}")
                    continue
                speed = read / took / 1e12
                print(f"{said}, {options}: {took * 1e6:.1f} us, {speed:.2f} TB/s", flush=True)


def time_of(kernel: Callable[..., Tensor], *arguments: Any) -> float:
    """The seconds that a call of decode attention takes, of many in a CUDA graph."""
    *tensors, options = arguments
    kernel(*tensors, 128**-0.5, 0, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            kernel(*tensors, 128**-0.5, 0, **options)
    graph.replay()
    began = synchronize()
    for _ in range(5):
        graph.replay()
    return (synchronize() - began) / 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = ("kernel", "even", "uneven")
    parser.add_argument("--case", nargs="*", choices=cases, default=cases)
    parser.add_argument("--only", nargs="*", default=[], help="ways to measure; default: all")
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs")
    parser.add_argument("--limit", type=int, default=75, help="seconds for each way")
    parser.add_argument("--profile", action="store_true", help="which kernels the engine runs")
    given = parser.parse_args()
    if DEVICE.type == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__)
    for case in given.case:
        if case == "kernel":
            run_kernel(given)
        else:
            run_case(case, given)


if __name__ == "__main__":
    main()
