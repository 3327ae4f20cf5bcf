"""Everything a run needs, made in the right order from its configuration."""

import os
from functools import partial

import torch
from rich.console import Console
from transformers import set_seed

from lacuna.config import Config
from lacuna.config.describe import to_toml
from lacuna.data import Loader, build_loader, build_validation, load_tokenizer
from lacuna.export.huggingface import save_model_description
from lacuna.model.build import build_model
from lacuna.parallel.mesh import build_mesh, resolve_layout
from lacuna.parallel.processes import Process, on_first
from lacuna.train.batch import BatchPlan, plan_batch
from lacuna.train.checkpoint import prepare_folder, read_tensors
from lacuna.train.metrics import MetricWriter
from lacuna.train.optimizer import build_optimizer, optimizer_tensors
from lacuna.train.resume import TrainState, find_start, model_tensors, restore
from lacuna.train.saver import CheckpointSaver


def total_steps(config: Config, loader: Loader) -> int:
    """The length of the run in steps, from `training.steps` or `training.epochs`."""
    return config.training.steps or config.training.epochs * loader.steps_per_epoch


def tokenizer_source(config: Config) -> str:
    """Where the tokenizer comes from: as set, else where the model or its configuration comes from."""
    source = str(config.model.tokenizer_path or config.model.name_or_path or config.model.config)
    return os.path.dirname(source) or "." if source.endswith(".json") else source


def _write_config(config: Config, plan: BatchPlan) -> None:
    """Writes every setting to the run folder, with the batch that they come to."""
    batch = {"global_batch_size": plan.global_batch, "gradient_accumulation_steps": plan.accumulation}
    resolved = to_toml(config.model_copy(update={"training": config.training.model_copy(update=batch)}))
    with open(os.path.join(str(config.job.dump_folder), "config.toml"), "w") as file:
        file.write(resolved)
    if config.job.print_args:
        print(resolved)


class Run:
    """The parts of a run, for the loop, put where the newest checkpoint left them.

    Raises `UserError` for whatever the configuration or the data get wrong.
    """

    def __init__(self, config: Config, process: Process, console: Console) -> None:
        self.config, self.process = config, process
        if config.training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first matrix product
            torch.use_deterministic_algorithms(True)
        layout = resolve_layout(config, process.world_size)
        mesh = build_mesh(layout, process.device.type)
        folder = os.path.join(str(config.job.dump_folder), config.checkpoint.folder)
        on_first(process, lambda: prepare_folder(folder))
        start, saved = find_start(config, folder, process)
        plan = self.plan = plan_batch(config, layout, saved and saved["global_batch"])
        on_first(process, lambda: _write_config(config, plan))
        tokenizer = self.tokenizer = load_tokenizer(tokenizer_source(config))
        share = {"dp_rank": mesh.data_rank, "dp_world": layout.data_parallel}
        self.loader = build_loader(config, tokenizer, **share, **vars(plan))
        self.total_steps = total_steps(config, self.loader)
        fill = None if start is None else lambda model: read_tensors(start, model_tensors(model), process)
        built = self.built = build_model(config, tokenizer, mesh, process.device, plan.accumulation, fill)
        self.optimizer = build_optimizer(built.model, config)
        set_seed((config.training.seed + process.rank) % 2**32)  # ranks differ, so that dropout does
        self.state = TrainState()
        if saved is not None:
            read_tensors(str(start), optimizer_tensors(built.model, self.optimizer), process)
            self.state = restore(saved, self.loader, process)
        wanted = config.validation.resolved_source()
        self.validation = wanted and build_validation(config, tokenizer, **share, micro_batch=plan.micro_batch)
        describe = partial(save_model_description, built.model.config, tokenizer, config.model.name_or_path)
        self.saver = CheckpointSaver(config, folder, describe, process)
        self.metrics = MetricWriter(config, process.rank, console, self.state.step, self.total_steps)
