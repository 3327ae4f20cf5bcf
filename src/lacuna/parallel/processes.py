"""This process among the others: its device, its groups, its time limits, its messages."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # it does not mark them as its own
    HashStore,
    Store,
    TCPStore,
)

from lacuna.config import STORE, Config, UnansweredError, UserError
from lacuna.config.machine import CommConfig

Result = TypeVar("Result")

# Ranks that wait for the same one give up within so many seconds of each other. The launcher's
# patience is longer.
LISTENING_SECONDS = 3.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Process:
    """One process of the run; by default one without groups, for commands that work on files.

    The process of rank 0 prints and writes files. `control` is a gloo group over all processes, for
    messages between steps. `background` is another one for threads, whose collectives must not mix
    with those of `control`.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    control: dist.ProcessGroup | None = None
    background: dist.ProcessGroup | None = None


def device_type() -> str:
    """`cuda` where there is a usable GPU, else `cpu`.

    `LACUNA_DEVICE=cpu` keeps a run off the GPUs.
    """
    is_kept_off = os.environ.get("LACUNA_DEVICE") == "cpu"
    return "cuda" if not is_kept_off and torch.cuda.is_available() else "cpu"


def start_process(comm: CommConfig, folder: str, offloads: bool) -> Process:
    """Joins the process group that the environment describes by torchrun's variables.

    Where it describes none, this process is a group of its own. `folder` is that of the run, and
    `offloads` says that GPUs exchange tensors in CPU memory as well. Raises `UnansweredError` where
    not all processes come together in time.
    """
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    kind = device_type()
    gpu = None
    backend = "gloo"
    if kind == "cuda":
        gpu = _select_gpu(int(os.environ.get("LOCAL_RANK", rank)), world_size)
        _record_communication(comm, folder)
        backend = "cpu:gloo,cuda:nccl" if offloads else "nccl"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    try:
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=_rendezvous_store(rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            device_id=gpu,
        )
        control, background = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    except RuntimeError as error:
        if not concerns_other_ranks(error):
            raise
        raise UnansweredError(
            f"not all of {world_size} processes came together within comm.init_timeout_seconds = "
            f"{timeout.seconds} (this is rank {rank}): {_first_line(error)}."
        ) from error
    for group in (control, background):  # a save of a large model may outlast any step
        set_timeout(group, comm.save_timeout_seconds)
    return Process(rank, world_size, gpu or torch.device("cpu"), control, background)


def _select_gpu(local_rank: int, world_size: int) -> torch.device:
    """Makes the GPU of this process its current one, and returns it."""
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        started = os.environ.get("LOCAL_WORLD_SIZE", world_size)
        raise UserError(
            f"{started} processes were started on a host with {gpus} GPU(s): start at most one per "
            "GPU (--gpus N)."
        )
    gpu = torch.device("cuda", local_rank)
    torch.cuda.set_device(gpu)
    return gpu


def _record_communication(comm: CommConfig, folder: str) -> None:
    """Has torch's flight recorder write to a run's folder when a wait for other ranks times out."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
    if comm.trace_buf_size:
        traces = os.path.join(folder, "comm_trace")
        os.makedirs(traces, exist_ok=True)
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(traces, "rank_"))


def concerns_other_ranks(error: BaseException) -> bool:
    """Whether an error is about messages between ranks; gloo's errors have no type of their own."""
    is_gloos = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return is_gloos or isinstance(error, dist.DistError)


@contextmanager
def naming_silent_ranks(comm: CommConfig) -> Iterator[None]:
    """Turns a failed wait for other ranks into an `UnansweredError` that names the silent ones."""
    try:
        yield
    except RuntimeError as error:
        if not concerns_other_ranks(error):
            raise
        silent = _silent_ranks()
        who = "all ranks answer, but too late"
        if silent:
            who = f"rank {', '.join(map(str, silent))} did not answer"
        raise UnansweredError(
            f"{who}: {_first_line(error)}. A wait ends after comm.init_timeout_seconds = "
            f"{comm.init_timeout_seconds} until the first step is done, comm.train_timeout_seconds "
            f"= {comm.train_timeout_seconds} after it, and comm.save_timeout_seconds = "
            f"{comm.save_timeout_seconds} where checkpoints are written. Once that process and its "
            "host are well, the same command goes on from the last checkpoint."
        ) from error


def _first_line(error: BaseException) -> str:
    """What an error says, without the place in torch's source."""
    return str(error).partition("\n")[0].rpartition("] ")[2].rstrip(".")


def _silent_ranks() -> list[int]:
    """The ranks that have not given up shortly after this one did.

    It aborts all groups.
    """
    for group in [*dist.distributed_c10d._world.pg_map]:
        group.abort()  # so that whoever waits for this rank gives up now
    store = dist.distributed_c10d._get_default_store()
    world_size = dist.get_world_size()
    heard: set[int] = set()

    def listen() -> None:
        with suppress(RuntimeError):  # where the store is gone with its rank
            store.set(f"lacuna/gave-up/{dist.get_rank()}", "")
            while len(heard) < world_size:
                for rank in range(world_size):
                    if store.check([f"lacuna/gave-up/{rank}"]):
                        heard.add(rank)
                time.sleep(POLL_SECONDS)

    # It listens in a thread, since the first rank has the store, and may be the silent one.
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(LISTENING_SECONDS)
    return sorted({*range(world_size)} - heard) if heard else [0]


def _rendezvous_store(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """The store where ranks meet, or None where torch opens its own as the environment says.

    torch's own listens on every network. So our launcher hands the first rank a socket that only
    this host can reach.
    """
    if "RANK" not in os.environ:
        return HashStore()
    if STORE not in os.environ:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank > 0:
        return TCPStore(host, port, world_size, timeout=timeout)
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=int(os.environ[STORE]),
    )


def stop_process() -> None:
    """Leaves the process group, once every rank has come to its end."""
    dist.barrier()
    dist.destroy_process_group()


def tighten_timeout(seconds: int, process: Process) -> None:
    """Has collectives fail sooner, once the first step (compilation, first data) is done.

    Messages between steps keep their time limit.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if group not in (process.control, process.background):
            set_timeout(group, seconds)


def set_timeout(group: dist.ProcessGroup, seconds: int) -> None:
    """Sets how long the ranks of a group wait for each other."""
    # There is no public call yet.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def gather_objects(process: Process, value: Result) -> list[Result]:
    """Gathers the `value` of every rank on every rank, over the control group."""
    if process.world_size == 1:
        return [value]
    values: list[Any] = [None] * process.world_size
    dist.all_gather_object(values, value, group=process.control)
    return values


def require_same_config(config: Config, process: Process) -> None:
    """Raises `UserError`, on all ranks alike, when their configurations differ."""
    own = {f"{section}.{name}": repr(value) for section, table in config for name, value in table}
    first, *others = gather_objects(process, own)
    for rank, other in enumerate(others, start=1):
        changed = sorted(other.items() - first.items())
        if changed:
            shown = "; ".join(
                f"{name} is {first[name]} on rank 0, {value} on rank {rank}"
                for name, value in changed[:3]
            )
            raise UserError(
                f"the processes were started with different configurations: {shown}. Start all of "
                "them with the same file and the same flags."
            )


def on_first(process: Process, action: Callable[[], Result]) -> Result:
    """Runs `action` on the first rank and hands its result to all.

    Whatever it raises is raised on all ranks alike.
    """
    outcome: tuple[Result | None, Exception | None] = (None, None)
    if process.rank == 0:
        try:
            outcome = (action(), None)
        except Exception as error:  # whatever it is, every rank raises it below
            outcome = (None, error)
    result, failure = gather_objects(process, outcome)[0]
    if failure is not None:
        raise failure
    return cast(Result, result)
