"""Recorded steps are the same steps, to the bit.

On a CPU, which has no CUDA graphs, a call takes the place of a graph: it runs its passes anew, on
tensors that stay where they were.
"""

import os
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from lacuna.config import load_config
from lacuna.config.sections import TrainingConfig
from lacuna.parallel.processes import start_process
from lacuna.train import recorded
from lacuna.train.recorded import RecordedSteps
from lacuna.train.recording_choice import _host_is_slower
from lacuna.train.setup import Run
from lacuna.train.state import Interval
from lacuna.train.trainer import train_step
from lacuna.train.watching import draws_of_host
from runs import environment, refused
from tiny import random_model, tiny_config

RUNS = {
    "AdamW": (),
    "in micro-batches": ("--training.gradient_accumulation_steps", "2"),
    "recomputed": ("--activation_checkpoint.mode", "full"),
    "Muon": ("--optimizer.name", "Muon"),
    "NorMuon": ("--optimizer.name", "Muon", "--optimizer.neuron_beta2", "0.95"),
    "adapters": ("--lora.rank", "4"),
    "small state": ("--optimizer.state_dtype", "bfloat16"),
    "foreach": ("--optimizer.implementation", "foreach"),
}
STEPS = 7
SAID = "called a synchronizing CUDA operation (Triggered internally by torch)"
PACKED = ("--training.seq_len", "64")  # so that no row is a single document


@dataclass
class Called:
    """What takes the place of a graph; `spoils` is done to the sums after each replay."""

    step: Callable[[], None]
    made: list[int]
    spoils: Callable[[], object] = int

    def replay(self) -> None:
        self.made.append(1)
        self.step()
        self.spoils()


def without_gpu(records: bool, made: list[int]) -> None:
    """Has recorded steps do with a CPU, in this process, and count their replays."""
    torch.cuda.graph_pool_handle = lambda: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=1)
    torch.cuda.max_memory_reserved = lambda device: 0
    torch.cuda.get_rng_state = torch.get_rng_state
    torch.cuda.set_rng_state = torch.set_rng_state
    torch.cuda.get_sync_debug_mode = lambda: 0
    torch.cuda.set_sync_debug_mode = lambda mode: None
    recorded.can_record = lambda device: records
    recorded.record = lambda step, *how: Called(step, made)


def steps_of(
    words: list[str], records: bool, spoils: bool, waits: bool, device: str
) -> tuple[dict[str, Tensor], int, bool]:
    """The weights after some steps, how much was replayed, and whether it still would be."""
    os.environ.update(environment(LACUNA_DEVICE=device))
    made: list[int] = []
    if device == "cpu":
        without_gpu(records, made)
    elif not records:
        recorded.can_record = lambda device: False
    config = load_config(words[0], words[1:])
    run = Run(
        config,
        start_process(config.comm, str(config.job.dump_folder), config.training.enable_cpu_offload),
        Console(quiet=True),
    )
    steps = RecordedSteps(run.built, run.objective.loss)
    if waits:
        steps.knows_documents = True  # as by an attention that needs no masks
        plain = steps._pass
        steps._pass = lambda *how: warnings.warn(SAID, stacklevel=2) or plain(*how)
    if spoils:

        def spoil() -> None:
            for kind in steps.kinds.values():
                kind.sums.mul_(2)

        recorded.record = lambda step, *how: Called(step, made, spoil)
    run.recorded = steps
    run.interval = Interval()
    for _ in range(STEPS):
        train_step(run, stop=False)
    names = run.built.model.named_parameters()
    if device == "cuda":
        made = [kind.seen - 2 for kind in steps.kinds.values() if kind.graph is not None]
    return {name: one.detach().cpu() for name, one in names}, sum(made), steps.is_wanted


def steps(
    world: Path,
    folder: Path,
    *flags: str,
    records: bool = True,
    spoils: bool = False,
    waits: bool = False,
    device: str = "cpu",
) -> Any:
    """`steps_of` a run with these flags, which has a process to itself."""
    words = [str(world / "run.toml"), "--job.dump_folder", str(folder), *flags]
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        return pool.submit(steps_of, words, records, spoils, waits, device).result()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | other)


@pytest.mark.parametrize("name", RUNS)
def test_recorded_steps_are_the_steps_of_the_model(world: Path, tmp_path: Path, name: str) -> None:
    flags = (*PACKED, *RUNS[name])
    replayed, made, wanted = steps(world, tmp_path / "replayed", *flags)
    computed, none, _ = steps(world, tmp_path / "computed", *flags, records=False)
    assert same(replayed, computed)
    assert wanted
    assert none == 0
    # Passes from the first of the second or third step on, and updates from the third where the
    # kernels of these wait for nothing.
    passes = STEPS * 2 - 2 if name == "in micro-batches" else STEPS - 2
    updates = 0 if name in ("small state", "foreach") else STEPS - 2
    assert made == passes + updates


def test_rows_of_one_document_are_computed_by_transformers_own_mask(
    world: Path, tmp_path: Path
) -> None:
    _, made, wanted = steps(world, tmp_path, "--data.document_mask", "false")
    assert made == STEPS - 2  # the updates alone
    assert wanted


def test_a_graph_that_finds_another_loss_is_given_up(world: Path, tmp_path: Path) -> None:
    given_up, made, wanted = steps(world, tmp_path / "spoilt", *PACKED, spoils=True)
    computed, _, _ = steps(world, tmp_path / "computed", *PACKED, records=False)
    assert not wanted
    assert made == 1  # the first, which was compared
    assert same(given_up, computed)


def test_nothing_is_left_of_graphs_that_are_given_up() -> None:
    given_up = RecordedSteps.__new__(RecordedSteps)
    weight = torch.nn.Parameter(torch.ones(2))
    given_up.kinds, given_up.gradients = {}, {weight: torch.ones(2)}
    given_up._give_up("a test")
    given_up.begin()
    assert not given_up.is_wanted
    assert given_up.updating is None
    assert weight.grad is None  # zeros would have its moments decay


def test_a_model_whose_passes_wait_for_numbers_is_not_recorded(world: Path, tmp_path: Path) -> None:
    watched, made, wanted = steps(world, tmp_path / "watched", *PACKED, waits=True)
    computed, _, _ = steps(world, tmp_path / "computed", *PACKED, records=False)
    assert not wanted
    assert made == 0
    assert same(watched, computed)


def test_what_is_drawn_on_the_cpu_is_noticed() -> None:
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        before = draws_of_host()
        assert draws_of_host() == before
        draw()
        assert draws_of_host() != before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--job.task", "preference"), "only pretrain and sft"),
        (("--optimizer.early_step_in_backward", "--training.max_norm", "0"), "drop one"),
        (
            ("--activation_checkpoint.mode", "full", "--activation_checkpoint.offload"),
            "what goes to CPU memory cannot be recorded",
        ),
        (("--training.enable_cpu_offload",), "the whole model on its device"),
        (("--data.document_mask", "false"), "leaves out the mask of whole rows"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    world: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    asked = ("--compile.cuda_graphs", "true", "--job.dump_folder", tmp_path)
    said = refused("train", world / "run.toml", *asked, *flags)
    assert "compile.cuda_graphs" in said
    assert message in said


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("qwen3_moe", ()),
        ("deepseek_v3", ("--model.router_bias_update_rate", "0.01")),
        ("deepseek_v3", ("--metrics.router", "true")),
    ],
)
def test_a_mixture_whose_choices_are_counted_is_refused(
    kind: str, flags: tuple[str, ...], world: Path, tmp_path: Path
) -> None:
    more = {"output_router_logits": True} if kind == "qwen3_moe" else {}
    config = tiny_config(kind, **more)
    config.to_json_file(tmp_path / "mixture.json")
    model = ("--model.name_or_path", "none", "--model.config", tmp_path / "mixture.json")
    asked = ("--compile.cuda_graphs", "true", "--job.dump_folder", tmp_path / "run")
    tokenizer = ("--model.tokenizer_path", world / "model")
    assert "routers" in refused("train", world / "run.toml", *model, *tokenizer, *asked, *flags)


@pytest.mark.parametrize(("peak", "slower"), [(1e15, True), (1e13, False), (None, False)])
def test_steps_are_recorded_unasked_where_kernels_take_less_time_than_the_host(
    peak: float | None, slower: bool
) -> None:
    model = random_model(tiny_config("llama", num_hidden_layers=4))
    built: Any = SimpleNamespace(model=model, flops=lambda tokens, lengths: 1e8 * tokens)
    training = TrainingConfig(batch_size=4, seq_len=256)  # 0.3 ms at 1e15, of 8 that the host takes
    assert _host_is_slower(training, built, peak) is slower


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", RUNS)
def test_on_a_gpu_replayed_kernels_make_the_same_steps(
    world: Path, tmp_path: Path, name: str
) -> None:
    flags = ("--training.deterministic", *RUNS[name])
    replayed, made, wanted = steps(world, tmp_path / "replayed", *flags, device="cuda")
    others = {"records": False, "device": "cuda"}
    computed, _, _ = steps(world, tmp_path / "computed", *flags, **others)
    assert made > 0
    assert wanted
    assert same(replayed, computed)
