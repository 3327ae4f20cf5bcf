"""A few steps of a run, measured: speed, memory by kind, time by class of kernel."""

import gc
import json
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from lacuna import __version__ as lacuna_version
from lacuna.config import Config, logger
from lacuna.config.documents import CurriculumConfig, ValidationConfig
from lacuna.config.machine import ProfilingConfig
from lacuna.config.optimizers import LRSchedulerConfig
from lacuna.parallel.mesh import AXES
from lacuna.parallel.processes import Process, gather_objects
from lacuna.train.kernels import recorded_intervals, time_by_class
from lacuna.train.metrics import peak_memory
from lacuna.train.setup import Run
from lacuna.train.trainer import train, train_step

# Steps before the first window, at least: the first ones compile, and try kernels out.
WARM_UP_STEPS = 3
PROFILED_STEPS = 3
_NEVER = 10**9
_PROFILED = "lacuna bench"
_PACKAGES = ("torch", "triton", "transformers", "torchao", "bitsandbytes", "flash-attn-4")


def warm_up_steps(window: int) -> int:
    """The steps before the first window, which begins at a multiple of `window` steps."""
    return window * -(-WARM_UP_STEPS // window)


def measured_config(config: Config, window: int, windows: int, folder: str) -> Config:
    """The run of `config` in another folder, for as many steps as are measured.

    It does nothing but train: it reports once in a window, and neither saves, validates nor sends
    anything. Its learning rate is constant, and its data are those before any stage of a
    curriculum.
    """
    steps = warm_up_steps(window) + window * windows
    changes: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": folder, "print_args": False},
        "training": {"steps": steps, "epochs": None},
        "checkpoint": {
            "enable_checkpoint": False,
            "create_seed_checkpoint": False,
            "hf_upload_enabled": False,
            "load_step": -1,
        },
        "metrics": {
            "log_freq": window,
            "enable_tensorboard": False,
            "enable_wandb": False,
            "rank_0_only": True,
        },
    }
    sections: dict[str, Any] = {
        name: getattr(config, name).model_copy(update=fields) for name, fields in changes.items()
    }
    sections |= {
        "lr_scheduler": LRSchedulerConfig(warmup_steps=0, decay_type="constant"),
        "curriculum": CurriculumConfig(),
        "validation": ValidationConfig(),
        "profiling": ProfilingConfig(),
    }
    return config.model_copy(update=sections)


def measure(
    config: Config, process: Process, console: Console, balanced: bool = False
) -> tuple[Run, dict[str, Any]]:
    """Makes the run of a `measured_config`, and measures its steps; all ranks must call it.

    If `balanced`, all experts of a mixture are given as many tokens by force.

    Returns what there is of the run after it, and what was measured: speed over all ranks, memory
    of the rank that took most, and the time of the first rank's kernels.
    """
    run = Run(config, process, console)
    if balanced:
        from lacuna.model.balanced_experts import balance_experts  # an extension

        balance_experts(run.built.model)
        logger.warning("experts are balanced by force: only times mean something, and no loss")
    with run.metrics as ending:
        ending.callback(lambda: run.loader.close())
        train(run, [])
        held: dict[str, Any] = _peaks(process.device)
        # Nothing is reported in the steps to come.
        quiet = config.metrics.model_copy(update={"log_freq": _NEVER})
        run.config = run.config.model_copy(update={"metrics": quiet})
        kernels = _profile(run)
        parts = _memory_parts(run)
    rest = (held["allocated"] or held["reserved"]) - sum(parts.values())
    held |= parts | {"activations_and_rest": rest}
    memory = max(gather_objects(process, held), key=lambda one: one["reserved"])
    path = Path(config.job.dump_folder, "metrics.jsonl")  # where the first rank is
    lines = path.read_text().splitlines() if path.exists() else []
    speed = _speed([json.loads(line) for line in lines], config.metrics.log_freq)
    return run, speed | {"memory_gib": memory, "kernels": kernels}


def describe(run: Run, name: str, settings: dict[str, Any], window: int) -> dict[str, Any]:
    """What was measured where: the run of this name and settings, versions, and the device."""
    device = run.process.device
    processor = platform.processor() or platform.machine()
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    layout = run.built.mesh.layout
    installed = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    return {
        "run": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "lacuna": lacuna_version,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{package: installed.get(package) for package in _PACKAGES},
        },
        "device": {
            "type": device.type,
            "name": processor,
            "processes": run.process.world_size,
            "peak_flops": run.peak_flops,
        },
        "model": type(run.built.model).__name__.removeprefix("FSDP"),
        "parameters": run.built.parameters,
        "attention": run.built.model.config._attn_implementation,
        "compiled": run.built.head.compiled,
        "layout": {axis: getattr(layout, axis) for axis in AXES},
        "sequences_of_a_step": run.batch.global_batch,
        "steps_of_a_window": window,
        "warm_up_steps": warm_up_steps(window),
        "settings": settings,
    }


def _speed(rows: Sequence[dict[str, Any]], window: int) -> dict[str, Any]:
    """What the rows say of the measured windows, each of which ends in a row."""
    first = warm_up_steps(window)
    measured = [row for row in rows if row["step"] > first]
    kept = ("step", "loss", "tokens_per_second", "mfu", "data_wait_fraction")
    return {
        "first_loss": rows[0]["loss"] if rows else None,
        "windows": [{name: row[name] for name in kept} for row in measured],
        "tokens_per_second": spread([row["tokens_per_second"] for row in measured]),
        "mfu": spread([row["mfu"] for row in measured if row["mfu"] is not None]),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and range of repeated measurements; None where there are none."""
    if not values:
        return None
    median = statistics.median(values)
    lowest, highest = min(values), max(values)
    relative = (highest - lowest) / median
    return {"median": median, "lowest": lowest, "highest": highest, "spread": relative}


def _peaks(device: torch.device) -> dict[str, Any]:
    """The peaks of this process's memory so far, in GiB.

    On a CPU nobody counts what is allocated.
    """
    is_gpu = device.type == "cuda"
    allocated = torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None
    return {"reserved": peak_memory(device), "allocated": allocated}


def _memory_parts(run: Run) -> dict[str, float]:
    """What this rank keeps on its device from step to step, in GiB, as one more step shows."""
    device = run.process.device.type
    seen = [0.0]

    def see_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        seen.append(stored_gib(gradients, device))

    hook = run.optimizer.register_step_pre_hook(see_gradients)
    train_step(run, False)
    hook.remove()
    if run.recorded is not None:  # whose graph calls no optimizer
        seen.append(stored_gib(list(run.recorded.gradients.values()), device))
    states = [
        value
        for state in run.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    # Of weights in halves the models' parameters are the upper ones.
    lower = getattr(run.optimizer, "rests", {}).values()
    return {
        "parameters": stored_gib([*run.built.model.parameters(), *lower], device),
        "gradients": max(seen),
        "optimizer": stored_gib(states, device),
    }


def stored_gib(tensors: Sequence[Tensor], device: str) -> float:
    """What this rank has of `tensors` on a kind of `device`, in GiB."""
    return sum(_stored_bytes(tensor, device) for tensor in tensors) / 2**30


def _stored_bytes(tensor: Tensor, device: str) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # of a tensor made of others, as shards are
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return sum(_stored_bytes(one, device) for one in inner if isinstance(one, Tensor))
    return tensor.nbytes if tensor.device.type == device else 0


def _profile(run: Run) -> dict[str, Any]:
    """Where the time of some steps went, in seconds a step.

    The profiler slows steps down, mostly on the host: idle time is longer than without it.
    """
    device = run.process.device
    synchronize = torch.get_device_module(device).synchronize
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    gc.disable()
    with profile(activities=activities) as profiler:
        train_step(run, False)  # the profiler's own first step
        synchronize()
        with record_function(_PROFILED):
            for _ in range(PROFILED_STEPS):
                train_step(run, False)
            synchronize()
    gc.enable()
    # `profiler.events()` makes a tree of operations: 16 s for 300,000 of them, where this takes 1.
    recorded = profiler.profiler.kineto_results.events()
    [whole] = [
        event
        for event in recorded
        if event.name() == _PROFILED and event.device_type() == DeviceType.CPU
    ]
    intervals = recorded_intervals(recorded, device)
    counted, busy = time_by_class(intervals, whole.start_ns(), whole.end_ns())
    scale = 1e9 * PROFILED_STEPS
    return {
        "steps": PROFILED_STEPS,
        "step_seconds": (whole.end_ns() - whole.start_ns()) / scale,
        "seconds": {name: time / scale for name, time in counted.items()},
        "busy_seconds": {name: time / scale for name, time in busy.items()},
    }
