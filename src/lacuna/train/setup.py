"""Everything a run needs, made in the right order from its configuration."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, set_seed

from lacuna.config import Config
from lacuna.config.describe import to_toml
from lacuna.data import Loader, build_loader, build_validation, load_tokenizer
from lacuna.export.huggingface import save_model_description
from lacuna.model.build import BuiltModel, build_model
from lacuna.parallel.mesh import build_mesh, resolve_layout
from lacuna.parallel.processes import Process, on_first
from lacuna.train.batch import BatchPlan, plan_batch
from lacuna.train.checkpoint import prepare_folder, read_tensors
from lacuna.train.metrics import MetricWriter
from lacuna.train.optimizer import build_optimizer, optimizer_tensors
from lacuna.train.resume import TrainState, find_start, model_tensors, restore
from lacuna.train.saver import CheckpointSaver


@dataclass
class Run:
    """The parts of a run, for the loop."""

    config: Config
    process: Process
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


def total_steps(config: Config, loader: Loader) -> int:
    """The length of the run in steps, from `training.steps` or `training.epochs`."""
    return config.training.steps or config.training.epochs * loader.steps_per_epoch


def tokenizer_source(config: Config) -> str:
    """Where the tokenizer comes from: as set, else where the model or its configuration comes from."""
    model = config.model
    if model.tokenizer_path or model.name_or_path:
        return str(model.tokenizer_path or model.name_or_path)
    source = str(model.config)
    return os.path.dirname(source) or "." if source.endswith(".json") else source


def _write_config(config: Config, plan: BatchPlan) -> None:
    """Writes every setting to the run folder, with the batch that they come to."""
    batch = {"global_batch_size": plan.global_batch, "gradient_accumulation_steps": plan.accumulation}
    resolved = to_toml(config.model_copy(update={"training": config.training.model_copy(update=batch)}))
    with open(os.path.join(str(config.job.dump_folder), "config.toml"), "w") as file:
        file.write(resolved)
    if config.job.print_args:
        print(resolved)


def set_up(config: Config, process: Process, console: Console) -> Run:
    """Builds every part of the run and puts it where its newest checkpoint left it.

    Raises `UserError` for whatever the configuration or the data get wrong.
    """
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first matrix product
        torch.use_deterministic_algorithms(True)
    layout = resolve_layout(config, process.world_size)
    mesh = build_mesh(layout, process.device.type)
    folder = os.path.join(str(config.job.dump_folder), config.checkpoint.folder)
    on_first(process, lambda: prepare_folder(folder))
    start, saved = find_start(config, folder, process)
    plan = plan_batch(config, layout, saved and saved["global_batch"])
    on_first(process, lambda: _write_config(config, plan))
    tokenizer = load_tokenizer(tokenizer_source(config))
    share = {"dp_rank": mesh.data_rank, "dp_world": layout.data_parallel}
    loader = build_loader(config, tokenizer, **share, **vars(plan))
    fill = None if start is None else lambda model: read_tensors(start, model_tensors(model), process)
    built = build_model(config, tokenizer, mesh, process.device, plan.accumulation, fill)
    optimizer = build_optimizer(built.model, config)
    set_seed((config.training.seed + process.rank) % 2**32)  # ranks differ, so that dropout does
    state = TrainState()
    if saved is not None:
        read_tensors(str(start), optimizer_tensors(built.model, optimizer), process)
        state = restore(saved, loader, process)
    wanted = config.validation.resolved_source()
    validation = wanted and build_validation(config, tokenizer, **share, micro_batch=plan.micro_batch)
    describe = partial(save_model_description, built.model.config, tokenizer, config.model.name_or_path)
    saver = CheckpointSaver(config, folder, describe, process)
    steps = total_steps(config, loader)
    metrics = MetricWriter(config, process.rank, console, state.step, steps)
    return Run(
        config, process, tokenizer, built, optimizer, plan, loader, validation, saver, metrics, state, steps
    )  # fmt: skip
