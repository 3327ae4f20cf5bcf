"""Profiler traces and memory snapshots, on request."""

import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    folder = str(config.job.dump_folder)
    callbacks: list[Callable[[int], None]] = []
    profiler = None
    if settings.enable_profiling:
        profiler = _profiler(os.path.join(folder, settings.save_traces_folder), settings.profile_freq, rank, start_step)
        callbacks.append(lambda step: profiler.step())
    if settings.enable_memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_ENTRIES)
        target = os.path.join(folder, settings.save_memory_snapshot_folder)
        callbacks.append(lambda step: _snapshot(target, step, rank) if step % settings.profile_freq == 0 else None)

    def after_step(step: int) -> None:
        for callback in callbacks:
            callback(step)

    if profiler is None:
        yield after_step
    else:
        with profiler:
            yield after_step


def _profiler(folder: str, every: int, rank: int, start_step: int) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    warmup = min(WARMUP_STEPS, every - 1)

    def save(profiler: torch.profiler.profile) -> None:
        step = start_step + profiler.step_num
        target = os.path.join(folder, f"step-{step}")
        os.makedirs(target, exist_ok=True)
        profiler.export_chrome_trace(os.path.join(target, f"rank-{rank}-trace.json"))
        logger.info("wrote the profiler trace of step %d to %s", step, target)

    schedule = torch.profiler.schedule(wait=every - warmup - 1, warmup=warmup, active=1)
    return torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=save, record_shapes=True)


def _snapshot(folder: str, step: int, rank: int) -> None:
    target = os.path.join(folder, f"step-{step}")
    os.makedirs(target, exist_ok=True)
    with open(os.path.join(target, f"rank-{rank}-memory.pickle"), "wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)
