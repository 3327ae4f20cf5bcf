"""Traces of steps and snapshots of GPU memory, for runs that ask for them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from lacuna.config.machine import ProfilingConfig

WARMUP_STEPS = 3
MAX_MEMORY_ENTRIES = 100_000


@contextmanager
def profiled(
    settings: ProfilingConfig, run_folder: str, rank: int, start_step: int
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call after every step with the number of steps done.

    Every `profiling.profile_freq` steps a Chrome trace of one step, and a memory snapshot (GPU), go
    to `<run_folder>/<save_…_folder>/step-N/rank-R…`.
    """
    every = settings.profile_freq

    def prepared_path(folder: str, step: int, kind: str) -> str:
        path = os.path.join(run_folder, folder, f"step-{step}", f"rank-{rank}-{kind}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def save_trace(profiler: torch.profiler.profile) -> None:
        step = start_step + profiler.step_num
        path = prepared_path(settings.save_traces_folder, step, "trace.json")
        profiler.export_chrome_trace(path)

    def after_step(step: int) -> None:
        if profiler is not None:
            profiler.step()
        if settings.enable_memory_snapshot and step % every == 0:
            folder = settings.save_memory_snapshot_folder
            path = prepared_path(folder, step, "memory.pickle")
            torch.cuda.memory._dump_snapshot(path)

    if settings.enable_memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_ENTRIES)
    profiler = None
    if settings.enable_profiling:
        warmup = min(WARMUP_STEPS, every - 1)
        schedule = torch.profiler.schedule(wait=every - warmup - 1, warmup=warmup, active=1)
        profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=save_trace, record_shapes=True
        )
    with profiler or nullcontext():
        yield after_step
