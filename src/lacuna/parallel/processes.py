"""This process among the others: device, process groups, time limits, and talk that must not touch the device."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lacuna.config import Config, refuse

Result = TypeVar("Result")


@dataclass(frozen=True)
class Process:
    """One process of the run; by default one that has no group, for tools that work on files.

    That of rank 0 prints and writes files. `control` is a gloo group over all of them for talk in between steps;
    `background` is another one for threads, whose collectives must not mix with those.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    control: dist.ProcessGroup | None = None
    background: dist.ProcessGroup | None = None


def device_type() -> str:
    """`cuda` where there is a usable GPU, else `cpu`; `LACUNA_DEVICE=cpu` keeps a run off the GPUs."""
    return "cuda" if os.environ.get("LACUNA_DEVICE") != "cpu" and torch.cuda.is_available() else "cpu"


def check_device(config: Config, kind: str) -> None:
    """Raises `UserError` for settings that need a GPU where there is none, or a package where there is one."""
    uncompiled = config.activation_checkpoint.mode == "memory_budget" and not config.compile.enable
    gpu_only = {
        'checkpoint.async_mode = "async_with_pinned_mem"': config.checkpoint.async_mode == "async_with_pinned_mem",
        "profiling.enable_memory_snapshot": config.profiling.enable_memory_snapshot,
        "parallelism.enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel,
        'activation_checkpoint.mode = "memory_budget" without compile.enable = true': uncompiled,
    }
    needs = "needs a GPU, and this run is on the CPU: leave it out"
    refuse({f"{setting} {needs}": wanted and kind != "cuda" for setting, wanted in gpu_only.items()})
    kernels = f"quantization.base: {config.quantization.base} on a GPU needs bitsandbytes, which is not installed"
    unaided = kind == "cuda" and config.quantization.base == "nf4" and not find_spec("bitsandbytes")
    refuse({f"{kernels}: pip install 'lacuna-train[qlora]'": unaided})


def start_process(config: Config) -> Process:
    """Joins the process group described by the environment (torchrun's variables), or makes a group of one."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, kind, gpu = int(os.environ.get("LOCAL_RANK", rank)), device_type(), None
    check_device(config, kind)
    if kind == "cuda":
        gpu = torch.device(kind, local_rank)
        gpus, started = torch.cuda.device_count(), os.environ.get("LOCAL_WORLD_SIZE", world_size)
        wrong = f"{started} processes were started on a host with {gpus} GPU(s): start at most one per GPU (--gpus N)"
        refuse({wrong: local_rank >= gpus})
        torch.cuda.set_device(gpu)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(config.comm.trace_buf_size))
        if config.comm.trace_buf_size:
            traces = os.path.join(str(config.job.dump_folder), "comm_trace")
            os.makedirs(traces, exist_ok=True)
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(traces, "rank_"))
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl" if config.training.enable_cpu_offload else "nccl"
    store = None if "RANK" in os.environ else dist.HashStore()
    timeout = timedelta(seconds=config.comm.init_timeout_seconds)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size, device_id=gpu)
    # A save of a large model may outlast any step: these groups wait as long as the longest of them.
    control, background = (dist.new_group(backend="gloo", timeout=timedelta(hours=2)) for _ in range(2))
    return Process(rank, world_size, gpu or torch.device("cpu"), control, background)


def stop_process() -> None:
    """Leaves the process group, once every rank has come to its end."""
    dist.barrier()
    dist.destroy_process_group()


def tighten_timeout(config: Config, process: Process) -> None:
    """After the first step (compilation, first data) a collective should fail sooner, but for talk in between steps."""
    timeout = timedelta(seconds=config.comm.train_timeout_seconds)
    for group in dist.distributed_c10d._world.pg_map:
        if group not in (process.control, process.background):
            dist.distributed_c10d._set_pg_timeout(timeout, group)  # there is no public call yet


def gather_objects(process: Process, value: Any) -> list[Any]:
    """`value` of every rank, on every rank, over the control group."""
    if process.world_size == 1:
        return [value]
    values: list[Any] = [None] * process.world_size
    dist.all_gather_object(values, value, group=process.control)
    return values


def require_same_config(config: Config, process: Process) -> None:
    """Raises `UserError`, on all ranks alike, when they were not all started with the same configuration."""
    own = {f"{section}.{name}": repr(value) for section, table in config for name, value in table}
    first, *others = gather_objects(process, own)
    for rank, other in enumerate(others, start=1):
        changed = sorted(other.items() - first.items())
        shown = "; ".join(f"{name} is {first[name]} on rank 0, {value} on rank {rank}" for name, value in changed[:3])
        wrong = f"the processes were started with different configurations: {shown}"
        refuse({f"{wrong}. Start all of them with the same file and the same flags": bool(changed)})


def on_first(process: Process, action: Callable[[], Result]) -> Result:
    """Runs `action` on the first rank and hands its result to all; an error of it is raised on all ranks alike."""
    result = failure = None
    if process.rank == 0:
        try:
            result = action()
        except Exception as error:  # passed on below, on every rank
            failure = error
    result, failure = gather_objects(process, (result, failure))[0]
    if failure is not None:
        raise failure
    return result
