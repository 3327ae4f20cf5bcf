"""Everything a run needs, made in the right order from its configuration."""

import json
import logging
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.config.describe import to_toml
from lacuna.data import Loader, build_loader, build_validation, load_tokenizer, merge_states
from lacuna.export.huggingface import save_model_description
from lacuna.model.build import BuiltModel, build_model
from lacuna.parallel.mesh import build_mesh, resolve_layout
from lacuna.parallel.processes import Process, on_first
from lacuna.train.batch import BatchPlan, plan_batch
from lacuna.train.checkpoint import clean_up, read_tensors
from lacuna.train.metrics import MetricWriter, peak_flops
from lacuna.train.optimizer import allocate_state, build_optimizer, optimizer_tensors
from lacuna.train.resume import (
    Start,
    TrainState,
    find_start,
    model_tensors,
    restore_model,
    seed_everything,
    set_random_states,
)
from lacuna.train.saver import CheckpointSaver, ensure_folder

logger = logging.getLogger(__name__)

FINISHED = "finished.json"


@dataclass
class Run:
    """The parts of a run, for the loop."""

    config: Config
    process: Process
    mesh: DeviceMesh
    tokenizer: PreTrainedTokenizerBase
    built: BuiltModel
    optimizer: torch.optim.AdamW
    plan: BatchPlan
    loader: Loader
    validation: Any
    saver: CheckpointSaver
    metrics: MetricWriter
    state: TrainState
    total_steps: int
    peak_flops: float | None

    def source_shares(self) -> dict[str, float]:
        """The share of all tokens so far that each source gave, when there are several."""
        seen, sources = self.state.source_tokens, self.config.data.resolved_sources()
        if len(sources) < 2:
            return {}
        return {f"share_{index}_{source.dataset}": seen[index] / sum(seen) for index, source in enumerate(sources)}

    def peak_memory(self) -> float:
        """Peak memory in GiB: what the allocator reserved on this GPU, or this process's resident set on a CPU."""
        if self.process.device.type == "cuda":
            return torch.cuda.max_memory_reserved() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def finished_step(config: Config) -> int | None:
    """The step at which the run in this folder came to the end that `config` asks for, or None."""
    path = os.path.join(str(config.job.dump_folder), FINISHED)
    if not os.path.exists(path) or config.checkpoint.load_step >= 0:  # who names a step wants to go back to it
        return None
    with open(path) as file:
        done = json.load(file)
    wanted = config.training
    enough = wanted.steps <= done["steps"] if wanted.steps is not None else wanted.epochs == done["epochs"]
    return done["step"] if enough else None


def mark_finished(config: Config, step: int) -> None:
    """Notes in the run folder that the run came to its end, which patience may have brought before its last step."""
    path = os.path.join(str(config.job.dump_folder), FINISHED)
    training = config.training
    with open(path + ".new", "w") as file:
        json.dump({"step": step, "steps": max(training.steps or 0, step), "epochs": training.epochs}, file)
    os.replace(path + ".new", path)


def apply_determinism(config: Config) -> None:
    """Deterministic kernels where asked for; must come before the first matrix product."""
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    # float32 products stay float32: tensor-core rounding is for those who choose bfloat16.
    torch.set_float32_matmul_precision("highest")


def total_steps(config: Config, loader: Loader) -> int:
    """The length of the run in steps, from `training.steps` or `training.epochs`."""
    if config.training.epochs is None:
        return int(config.training.steps)
    if loader.steps_per_epoch is None:
        raise UserError("training.epochs: the length of this data is not known: give training.steps instead.")
    return config.training.epochs * loader.steps_per_epoch


def describer(config: Config, built: BuiltModel, tokenizer: PreTrainedTokenizerBase) -> Callable[[str], None]:
    """A function that writes the model's configuration and tokenizer into a folder."""
    return lambda folder: save_model_description(folder, built.model.config, tokenizer, config.model.name_or_path)


def tokenizer_source(config: Config) -> str:
    """Where the tokenizer comes from: as set, else where the model or its configuration comes from."""
    model = config.model
    if model.tokenizer_path or model.name_or_path:
        return str(model.tokenizer_path or model.name_or_path)
    source = str(model.config)
    return os.path.dirname(source) or "." if source.endswith(".json") else source


def _resolved(config: Config, plan: BatchPlan) -> Config:
    """The configuration with the batch that it comes to."""
    training = config.training.model_copy(
        update={"global_batch_size": plan.global_batch, "gradient_accumulation_steps": plan.accumulation}
    )
    return config.model_copy(update={"training": training})


def _write_config(config: Config) -> None:
    with open(os.path.join(str(config.job.dump_folder), "config.toml"), "w") as file:
        file.write(to_toml(config))


def _restore_rest(
    start: Start, built: BuiltModel, optimizer: torch.optim.AdamW, loader: Loader, process: Process, config: Config
) -> TrainState:
    """Puts optimizer, data and random numbers, all in place, where the checkpoint left them."""
    seed_everything(config.training.seed, process.rank)
    if start.state is None:
        if start.path is not None:
            logger.info("starting from the weights in %s", start.path)
        return TrainState()
    allocate_state(optimizer)
    read_tensors(str(start.path), optimizer_tensors(built.model, optimizer), process)
    ranks = start.state["ranks"]
    loader.load_state_dict(merge_states([rank["data"] for rank in ranks]))
    if len(ranks) == process.world_size:
        set_random_states(ranks[process.rank]["random"])
    state = TrainState(**start.state["counters"])
    logger.info("resuming after step %d from %s", state.step, start.path)
    return state


def set_up(config: Config, process: Process, console: Console) -> Run:
    """Builds every part of the run and puts it where its newest checkpoint left it.

    Raises `UserError` for whatever the configuration or the data get wrong.
    """
    apply_determinism(config)
    layout = resolve_layout(config, process.world_size)
    mesh = build_mesh(layout, process.device.type)
    folder = on_first(process, lambda: ensure_folder(config))
    on_first(process, lambda: clean_up(folder))
    start = find_start(config, folder, process)
    plan = plan_batch(config, layout.data_parallel, start.state and start.state["global_batch"])
    resolved = _resolved(config, plan)
    on_first(process, lambda: _write_config(resolved))
    tokenizer = load_tokenizer(tokenizer_source(config))
    loader = build_loader(
        config, tokenizer, dp_rank=process.rank, dp_world=layout.data_parallel, **vars(plan)
    )  # fmt: skip
    restore = None if start.path is None else lambda model: restore_model(model, str(start.path), process)
    built = build_model(config, tokenizer, mesh, process.device, restore)
    optimizer = build_optimizer(built.model, config)
    state = _restore_rest(start, built, optimizer, loader, process, config)
    validation = None
    if config.validation.resolved_source() is not None:
        validation = build_validation(
            config, tokenizer, dp_rank=process.rank, dp_world=layout.data_parallel, micro_batch=plan.micro_batch
        )
    saver = CheckpointSaver(config, folder, describer(config, built, tokenizer), process)
    saver.best_step = state.best_step if config.checkpoint.keep_best else None
    steps = total_steps(config, loader)
    metrics = MetricWriter(config, process.rank, console, state.step, steps)
    return Run(
        config, process, mesh, tokenizer, built, optimizer, plan, loader, validation, saver, metrics, state, steps,
        peak_flops(process.device),
    )  # fmt: skip


def save_seed(run: Run) -> None:
    """Writes the initial weights as `step-0`, for runs in any layout to start from."""
    state = {"step": 0, "counters": {}, "global_batch": run.plan.global_batch, "settings": {}, "ranks": []}
    run.saver.save(0, model_tensors(run.built.model), state, wait=True)
