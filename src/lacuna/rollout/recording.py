"""Steps of generating or training that are recorded once, as CUDA graphs, and then replayed."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from lacuna.config import logger

# The share of a GPU's memory that a graph may ask for while it is recorded.
_SPARE = 0.1
# Graphs whose capture failed, to which torch's allocator still points; no other is tried then.
_failed: list[torch.cuda.CUDAGraph] = []


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps memory for each stream that it has ever worked on."""
    return torch.cuda.Stream(device)


@cache
def _keeper(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph that does nothing of use, and whose memory all others have as well.

    Nothing in it outlives a step. Without a graph that stays, the next ones would take other memory
    each time, and torch would hold on to what the last ones had.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(_stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()
    return graph


def can_record(device: torch.device) -> bool:
    """Whether steps on a device may be recorded; none is once one could not be."""
    return device.type == "cuda" and not _failed


def give_back_memory() -> None:
    """Lets torch give back what graphs have had, once none of them is left."""
    _keeper.cache_clear()


def _free_generator(device: torch.device) -> None:
    """Lets numbers be drawn again after a capture that failed.

    Before torch's pull request 176752 the generator takes such a capture to go on (issue 171263).
    """
    state = torch.cuda.get_rng_state(device)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(generator.device))
    torch.cuda.set_rng_state(state, device)


def record(
    step: Callable[[], None],
    device: torch.device,
    what: str = "generating",
    memory: Any = None,
) -> torch.cuda.CUDAGraph | None:
    """Records a `step` whose code is compiled; None, with a warning, where that cannot be.

    Its tensors get the `memory` of other graphs, by default of those of which none outlives a step.
    torch.cuda.graph would give all cached memory back first, each time, and training would ask for
    it again; that is done only where little is left.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    free, total = torch.cuda.mem_get_info(device)
    if free < _SPARE * total:
        torch.cuda.empty_cache()
    memory = memory or _keeper(device).pool()
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(_stream(device)):
            graph.capture_begin(memory, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
    except RuntimeError as fault:
        # torch leaves its own stream current, and its allocator waiting for the capture's end.
        torch.cuda.set_stream(stream)
        _failed.append(graph)
        with suppress(RuntimeError):  # where the capture itself has ended
            torch._C._cuda_endAllocateToPool(stream.device_index, memory)
        torch.cuda.synchronize()
        _free_generator(device)
        said = " ".join(str(fault).split())[:200]
        logger.warning("%s goes on without CUDA graphs: %s", what, said)
        return None
    return graph
