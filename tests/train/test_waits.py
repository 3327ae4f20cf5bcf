"""Between two logs no step makes the host wait for the device."""

import os
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from lacuna.config import load_config
from lacuna.parallel.processes import start_process
from lacuna.train.setup import Run
from lacuna.train.state import Interval
from lacuna.train.trainer import train_step
from runs import environment

RUNS = {
    "packed": [],
    "padded, which the head leaves out": ["--packing.mode", "none", "--training.seq_len", "128"],
    "in micro-batches": ["--training.gradient_accumulation_steps", "2"],
    "recomputed": ["--activation_checkpoint.mode", "full"],
    "in pieces": ["--activation_checkpoint.mlp_chunks", "2"],
    "skipping": ["--training.skip_nan_inf"],
    "early": ["--optimizer.early_step_in_backward", "--training.max_norm", "0"],
    "moved state": ["--optimizer.state_offload_share", "0.5"],
    "adapters": ["--lora.rank", "4"],
    "Muon": ["--optimizer.name", "Muon"],
    "NorMuon": ["--optimizer.name", "Muon", "--optimizer.neuron_beta2", "0.95"],
    "deterministic": ["--training.deterministic"],
}
ON_THE_HOST = {"data", "inputs.py", "step_flops", "find_packed_sequence_indices"}
"""Folders, files and functions whose tensors are in the host's memory, where reading is no wait.

The last belongs to transformers' masks, which our attention, the first choice on a GPU, never has
made.
"""

READS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
}
"""Operators whose result the host must have before it goes on."""


class Reads(TorchDispatchMode):
    """Notes where tensors are read by the host, on a CPU, where nothing else tells."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if operator.name().partition(".")[0] in READS:
            frames = traceback.extract_stack()
            ours = [frame for frame in frames if "/lacuna/" in frame.filename][-1]
            places = {*Path(ours.filename).parts, *(frame.name for frame in frames)}
            if not ON_THE_HOST & places:
                self.found.append(f"{operator.name()} in {ours.name} of {ours.filename}")
        return operator(*arguments, **(named or {}))


@contextmanager
def waits_noted(found: list[str]) -> Iterator[None]:
    """Within it, what waits is noted, or on a GPU raises an error."""
    if torch.cuda.is_available() and os.environ.get("LACUNA_DEVICE") != "cpu":
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")
        return
    with Reads() as reads:
        yield
    found += reads.found


def waits_of(words: list[str], variables: dict[str, str]) -> list[str]:
    """The waits in the third and fourth step of a run, which has a process to itself."""
    os.environ.update(variables)
    config = load_config(words[0], words[1:])
    run = Run(
        config,
        start_process(config.comm, str(config.job.dump_folder), config.training.enable_cpu_offload),
        Console(quiet=True),
    )
    run.interval = Interval()
    found: list[str] = []
    for _ in range(2):  # which compile, make the optimizer's state, and log the first
        train_step(run, stop=False)
    with waits_noted(found):
        for _ in range(2):
            train_step(run, stop=False)
    return found


def waits(world: Path, folder: Path, *flags: str, device: str = "cpu") -> Any:
    seldom = ["--metrics.log_freq", "100", "--checkpoint.interval", "100"]
    words = [str(world / "run.toml"), "--job.dump_folder", str(folder), *seldom, *flags]
    variables = environment(LACUNA_DEVICE=device)
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        return pool.submit(waits_of, words, variables).result()


@pytest.mark.parametrize("name", RUNS)
def test_steps_that_do_not_log_read_nothing_from_the_device(
    world: Path, tmp_path: Path, name: str
) -> None:
    assert waits(world, tmp_path, *RUNS[name]) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", RUNS)
def test_steps_that_do_not_log_do_not_wait_for_a_gpu(
    world: Path, tmp_path: Path, name: str
) -> None:
    assert waits(world, tmp_path, *RUNS[name], device="cuda") == []


def test_a_wait_is_found(world: Path, tmp_path: Path) -> None:
    flags = ["--optimizer.implementation", "foreach"]  # which asks whether to skip a step
    assert any("_local_scalar_dense in update" in one for one in waits(world, tmp_path, *flags))
