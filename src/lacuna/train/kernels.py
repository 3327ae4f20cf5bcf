"""Where the time of a step goes: kernels by class, and the time in which none runs."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType, _KinetoEvent

IDLE = "idle"
# Class -> what the names of its kernels and operations contain. The first that fits counts; where
# several run at once, the one that stands first is given the time. So communication has only the
# time in which nothing is computed beside it.
CLASSES = {
    "attention": r"flash|fmha|sdpa?(?![a-z])|attention|attn",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|matmul|linear|convolution|"
    r"(?<![a-z])(add|badd)?b?mm(?![a-z])",
    "copies": r"memcpy|memset|copy|aten::(to|cat|stack|clone|contiguous|fill_|zero_)$|catarray|"
    r"chunk_cat",
    "elementwise": "",
    "communication": r"nccl|gloo|c10d|nvshmem|multimem|all_?gather|all_?reduce|reduce_?scatter|"
    r"all_?to_?all|record_param_comms",
}
# The compiler names a fused kernel after what it replaces, but it is elementwise or a reduction.
_FUSED = re.compile(r"^triton_(poi|red|per|for)_")
_ORDER = ("communication", "attention", "matrix products", "copies")
# Names of ranges that are no work themselves, though their names look like operations.
_RANGES = ("autograd::", "torch::autograd::", "FSDP::", "Optimizer.")


class Interval(NamedTuple):
    """When something of a class ran, in nanoseconds of any one clock."""

    start: float
    end: float
    kind: str


def kernel_class(name: str) -> str:
    """The class of the kernel or operation of this name."""
    if _FUSED.match(name):
        return "elementwise"
    found = (kind for kind in _ORDER if re.search(CLASSES[kind], name.lower()))
    return next(found, "elementwise")


def time_by_class(
    intervals: Iterable[Interval], start: float, end: float
) -> tuple[dict[str, float], dict[str, float]]:
    """The time from `start` to `end` by class, twice.

    In the first every moment is counted once, for the first class that runs then or as idle, so
    that all together are `end - start`. In the second a class has all the time in which it runs.
    """
    counted = dict.fromkeys([*CLASSES, IDLE], 0.0)
    busy = dict.fromkeys(CLASSES, 0.0)
    changes = []
    for interval in intervals:
        begun = min(max(interval.start, start), end)
        ended = max(min(interval.end, end), begun)
        changes += [(begun, 1, interval.kind), (ended, -1, interval.kind)]
    running: Counter[str] = Counter()
    now = start
    for moment, change, kind in sorted(changes):
        active = [name for name in CLASSES if running[name]]
        for name in active:
            busy[name] += moment - now
        counted[active[0] if active else IDLE] += moment - now
        running[kind] += change
        now = moment
    counted[IDLE] += end - now
    return counted, busy


def recorded_intervals(events: Iterable[_KinetoEvent], device: torch.device) -> list[Interval]:
    """The kernels among a profiler's events; on a CPU the operations."""
    wanted = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    intervals = []
    for event in events:
        name = event.name()
        is_range = event.is_user_annotation() or name.startswith(_RANGES)
        if event.device_type() != wanted or is_range:
            continue
        kind = kernel_class(name)
        if device.type == "cpu" and "::" not in name and kind != "communication":
            continue  # a range around operations
        intervals.append(Interval(event.start_ns(), event.end_ns(), kind))
    return intervals
