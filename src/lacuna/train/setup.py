"""Everything a run needs, made in the right order from its configuration."""

import logging
import os
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from lacuna.config import Config, UserError
from lacuna.config.describe import to_toml
from lacuna.data import Loader, build_loader, build_validation, run_tokenizer
from lacuna.export.huggingface import save_model_description
from lacuna.model.architecture import attention_widths
from lacuna.model.build import build_model
from lacuna.parallel.mesh import build_mesh, resolve_layout
from lacuna.parallel.processes import Process, on_first
from lacuna.train import checkpoint
from lacuna.train.batch import BatchPlan, plan_batch
from lacuna.train.metrics import MetricWriter, peak_flops
from lacuna.train.optimizer import build_optimizer, optimizer_tensors

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """Counters of a run. `step` is the number of steps done, `tokens` (`source_tokens`) those seen by all ranks."""

    source_tokens: list[int]
    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    best_loss: float = float("inf")
    best_step: int | None = None
    worse_validations: int = 0


@dataclass
class Interval:
    """What is measured from one log to the next; `started` is put off by the time that is not training."""

    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


def total_steps(config: Config, loader: Loader) -> int:
    """The length of the run in steps, from `training.steps` or `training.epochs`."""
    return config.training.steps or config.training.epochs * loader.steps_per_epoch


def _write_config(config: Config, plan: BatchPlan) -> None:
    """Writes every setting to the run folder, with the batch that they come to."""
    batch = {"global_batch_size": plan.global_batch, "gradient_accumulation_steps": plan.accumulation}
    resolved = to_toml(config.model_copy(update={"training": config.training.model_copy(update=batch)}))
    Path(str(config.job.dump_folder), "config.toml").write_text(resolved)
    if config.job.print_args:
        print(resolved)


def find_start(config: Config, folder: str, process: Process) -> tuple[str | None, dict[str, Any] | None]:
    """The checkpoint that the weights come from, if any, and its state where everything else does too.

    That is the newest complete checkpoint in `folder` or the one asked for; `step-0` and
    `checkpoint.initial_load_path` give weights only. Raises `UserError` for one that cannot be used.
    """
    settings, path = config.checkpoint, None
    if settings.enable_checkpoint and settings.load_step >= 0:
        asked = checkpoint.checkpoint_path(folder, settings.load_step)
        path = checkpoint.require_complete(asked, "checkpoint.load_step", process)
    elif settings.enable_checkpoint:
        path = checkpoint.newest_complete(folder, process)
    state = {"step": 0} if path is None else checkpoint.read_state(path)
    if path is None and settings.initial_load_path:
        path = checkpoint.require_complete(settings.initial_load_path, "checkpoint.initial_load_path", process)
    if state["step"] == 0:
        if path is not None:
            logger.info("starting from the weights in %s", path)
        return path, None
    if "data" not in state:
        raise UserError(
            f"checkpoint.load_step: {path} holds weights only (checkpoint.model_weights_only), so the run cannot go "
            f"on from it: start a new run with checkpoint.initial_load_path = {path!r}."
        )
    logger.info("resuming after step %d from %s", state["step"], path)
    return path, state


class Run:
    """The parts of a run, put where the newest checkpoint left them, and the moving parts of the loop over them.

    Raises `UserError` for whatever the configuration or the data get wrong.
    """

    interval: Interval
    pending: tuple[Tensor, torch.cuda.Event] | None = None
    stopping = save_wanted = False
    skipped_in_a_row = 0

    def __init__(self, config: Config, process: Process, console: Console) -> None:
        self.config, self.process = config, process
        if config.training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first matrix product
            torch.use_deterministic_algorithms(True)
        layout = resolve_layout(config, process.world_size)
        mesh = build_mesh(layout, process.device.type)
        folder = os.path.join(str(config.job.dump_folder), config.checkpoint.folder)
        on_first(process, lambda: checkpoint.prepare_folder(folder))
        start, saved = find_start(config, folder, process)
        plan = self.plan = plan_batch(config, layout, saved and saved["global_batch"])
        tokenizer = self.tokenizer = run_tokenizer(config)
        share = {"dp_rank": mesh.data_rank, "dp_world": layout.data_parallel}
        self.loader = build_loader(config, tokenizer, **share, **vars(plan))
        self.state = TrainState([0] * len(config.data.resolved_sources()))
        if saved is not None:
            self.loader.load_state_dict(saved["data"])  # refuses other samples before anything is written
            self.state = TrainState(**saved["counters"])
        on_first(process, lambda: _write_config(config, plan))
        self.total_steps = total_steps(config, self.loader)
        read = partial(checkpoint.read_tensors, str(start), process=process)
        built = self.built = build_model(config, tokenizer, mesh, process.device, plan.accumulation, start is None)
        if start is not None:
            read(checkpoint.model_tensors(built.model))
        self.optimizer = build_optimizer(built.model, config)
        if saved is not None:
            read(optimizer_tensors(built.model, self.optimizer))
        wanted = config.validation.resolved_source()
        self.validation = wanted and build_validation(config, tokenizer, **share, micro_batch=plan.micro_batch)
        describe = partial(save_model_description, built.model.config, tokenizer, config.model.name_or_path)
        self.saver = checkpoint.CheckpointSaver(config, folder, describe, process)
        self.metrics = MetricWriter(config, process.rank, console, self.state.step, self.total_steps)
        self.first_step, self.saved_step = self.state.step + 1, self.state.step
        self.peak_flops = peak_flops(process.device)
        self.attention_widths = attention_widths(built.model.config)
