"""This process among the others: device, process groups, time limits, and talk that must not touch the device."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lacuna.config import STORE, Config, UnansweredError, refuse

Result = TypeVar("Result")

# Ranks that wait for the same one give up within so long of each other; shorter than the launcher's
# patience.
LISTENING_SECONDS = 3.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Process:
    """One process of the run; by default one that has no group, for tools that work on files.

    That of rank 0 prints and writes files. `control` is a gloo group over all of them for talk in
    between steps; `background` is another one for threads, whose collectives must not mix with
    those.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    control: dist.ProcessGroup | None = None
    background: dist.ProcessGroup | None = None


def device_type() -> str:
    """`cuda` where there is a usable GPU, else `cpu`; `LACUNA_DEVICE=cpu` keeps a run off the GPUs."""
    return (
        "cuda" if os.environ.get("LACUNA_DEVICE") != "cpu" and torch.cuda.is_available() else "cpu"
    )


def check_device(config: Config, kind: str) -> None:
    """Raises `UserError` for settings that need a GPU where there is none, or a package where there is one."""
    uncompiled = config.activation_checkpoint.mode == "memory_budget" and not config.compile.enable
    gpu_only = {
        'checkpoint.async_mode = "async_with_pinned_mem"': config.checkpoint.async_mode
        == "async_with_pinned_mem",
        "profiling.enable_memory_snapshot": config.profiling.enable_memory_snapshot,
        "parallelism.enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel,
        'activation_checkpoint.mode = "memory_budget" without compile.enable = true': uncompiled,
    }
    needs = "needs a GPU, and this run is on the CPU: leave it out"
    refuse(
        {f"{setting} {needs}": wanted and kind != "cuda" for setting, wanted in gpu_only.items()}
    )
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
    backend = (
        "gloo"
        if kind == "cpu"
        else "cpu:gloo,cuda:nccl"
        if config.training.enable_cpu_offload
        else "nccl"
    )
    timeout = timedelta(seconds=config.comm.init_timeout_seconds)
    apart = f"not all of {world_size} processes came together within comm.init_timeout_seconds = {timeout.seconds}"
    try:
        store = _store(rank, world_size, timeout)
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=world_size, device_id=gpu
        )
        control, background = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    except RuntimeError as error:
        if not of_other_ranks(error):
            raise
        raise UnansweredError(f"{apart} (this is rank {rank}): {_first_line(error)}.") from error
    for group in (control, background):  # a save of a large model may outlast any step
        set_timeout(group, config.comm.save_timeout_seconds)
    return Process(rank, world_size, gpu or torch.device("cpu"), control, background)


def of_other_ranks(error: BaseException) -> bool:
    """Whether an error is about the talk with other ranks; gloo's have no type of their own."""
    return (
        isinstance(error, dist.DistError)
        or isinstance(error, RuntimeError)
        and "/gloo/" in str(error)
    )


@contextmanager
def answered(config: Config) -> Iterator[None]:
    """Within it, a wait for other ranks that came to nothing ends in an error that names those that did not answer."""
    try:
        yield
    except RuntimeError as error:
        if not of_other_ranks(error):
            raise
        silent, comm = _silent_ranks(), config.comm
        who = (
            f"rank {', '.join(map(str, silent))} did not answer"
            if silent
            else "all ranks answer, but too late"
        )
        raise UnansweredError(
            f"{who}: {_first_line(error)}. A wait ends after comm.init_timeout_seconds = {comm.init_timeout_seconds} "
            f"until the first step is done, comm.train_timeout_seconds = {comm.train_timeout_seconds} after it, and "
            f"comm.save_timeout_seconds = {comm.save_timeout_seconds} where checkpoints are written. Once that process "
            f"and its host are well, the same command goes on from the last checkpoint."
        ) from error


def _first_line(error: BaseException) -> str:
    """What an error says, without the place in torch's source."""
    return str(error).partition("\n")[0].rpartition("] ")[2].rstrip(".")


def _silent_ranks() -> list[int]:
    """The ranks that have not given up as well a little after this one did; ends all talk over the groups."""
    for group in [*dist.distributed_c10d._world.pg_map]:
        group.abort()  # so that whoever waits for this rank gives up now
    store, own, world_size = (
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        dist.get_world_size(),
    )
    heard: set[int] = set()

    def listen() -> None:
        with suppress(RuntimeError):  # where the store is gone with its rank
            store.set(f"lacuna/gave-up/{own}", "")
            while len(heard) < world_size:
                heard.update(
                    rank for rank in range(world_size) if store.check([f"lacuna/gave-up/{rank}"])
                )
                time.sleep(POLL_SECONDS)

    listener = threading.Thread(
        target=listen, daemon=True
    )  # the first rank has the store, and may be the silent one
    listener.start()
    listener.join(LISTENING_SECONDS)
    return sorted({*range(world_size)} - heard) if heard else [0]


def _store(rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """Where ranks meet; None where torch opens its own as the environment says.

    Its own faces every network: our launcher hands the first rank a socket that faces none.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    if STORE not in os.environ:
        return None
    own = {"is_master": True, "master_listen_fd": int(os.environ[STORE])} if rank == 0 else {}
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, world_size, timeout=timeout, **own)


def stop_process() -> None:
    """Leaves the process group, once every rank has come to its end."""
    dist.barrier()
    dist.destroy_process_group()


def tighten_timeout(config: Config, process: Process) -> None:
    """After the first step (compilation, first data) a collective should fail sooner, but for talk in between steps."""
    for group in dist.distributed_c10d._world.pg_map:
        if group not in (process.control, process.background):
            set_timeout(group, config.comm.train_timeout_seconds)


def set_timeout(group: dist.ProcessGroup, seconds: int) -> None:
    """Sets how long the ranks of a group wait for each other."""
    dist.distributed_c10d._set_pg_timeout(
        timedelta(seconds=seconds), group
    )  # there is no public call yet


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
        shown = "; ".join(
            f"{name} is {first[name]} on rank 0, {value} on rank {rank}"
            for name, value in changed[:3]
        )
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
