"""Profiler traces and memory snapshots, on request."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from lacuna.config import Config

logger = logging.getLogger(__name__)

WARMUP_STEPS = 3
MAX_MEMORY_ENTRIES = 100_000


@contextmanager
def profiled(config: Config, rank: int, start_step: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call after every step with the number of steps done.

    Every `profiling.profile_freq` steps a Chrome trace of one step, and a memory snapshot (GPU), go to
    `<dump_folder>/<save_…_folder>/step-N/rank-R…`.
    """
    settings = config.profiling
    every, warmup = settings.profile_freq, min(WARMUP_STEPS, settings.profile_freq - 1)

    def target(folder: str, step: int, kind: str) -> str:
        path = os.path.join(str(config.job.dump_folder), folder, f"step-{step}", f"rank-{rank}-{kind}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def save_trace(profiler: torch.profiler.profile) -> None:
        path = target(settings.save_traces_folder, start_step + profiler.step_num, "trace.json")
        profiler.export_chrome_trace(path)
        logger.info("wrote the profiler trace %s", path)

    def after_step(step: int) -> None:
        if profiler is not None:
            profiler.step()
        if settings.enable_memory_snapshot and step % every == 0:
            torch.cuda.memory._dump_snapshot(target(settings.save_memory_snapshot_folder, step, "memory.pickle"))

    if settings.enable_memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_ENTRIES)
    profiler = None
    if settings.enable_profiling:
        schedule = torch.profiler.schedule(wait=every - warmup - 1, warmup=warmup, active=1)
        profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=save_trace, record_shapes=True)
    with profiler or nullcontext():
        yield after_step
