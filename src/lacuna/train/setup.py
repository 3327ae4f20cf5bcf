"""Everything a run needs, made in the right order from its configuration, its batches first."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from rich.console import Console

from lacuna.config import Config, explained, logger, of_stage, refuse, to_toml
from lacuna.config.checks import long_warmup
from lacuna.data import Batch, BatchPlan, Loader, build_loader, build_validation, run_tokenizer
from lacuna.data.disk import replace_text
from lacuna.export.huggingface import export_adapter, export_model, save_model_description
from lacuna.model.build import build_model
from lacuna.objective.find import find_objective
from lacuna.parallel.mesh import Layout, Mesh, build_mesh, resolve_layout
from lacuna.parallel.processes import Process, on_first
from lacuna.parallel.schedule import held_stages, pipeline_order
from lacuna.train import checkpoint
from lacuna.train.branch import goes_back, set_aside
from lacuna.train.metrics import MetricWriter, peak_flops
from lacuna.train.optimizer import build_optimizer, learning_rate, optimizer_tensors
from lacuna.train.reader import read_state
from lacuna.train.resume import described, inputs_of, refuse_other_inputs, say_changes, settings_of


def plan_stages(
    config: Config, layout: Layout, saved: int | None = None
) -> list[tuple[Config, BatchPlan]]:
    """The configuration and the batch of each stage of the curriculum, the first of which is that before all others.

    `saved` is the global batch of the first. Raises `UserError` as `plan_batch` does.
    """
    plan = plan_batch(config, layout, saved)
    batch = {"batch_size": plan.micro_batch, "gradient_accumulation_steps": plan.accumulation}
    batch["global_batch_size"] = plan.global_batch
    first = config.model_copy(update={"training": config.training.model_copy(update=batch)})
    planned = [(first, plan)]
    for number, stage in enumerate(first.stages()[1:], start=1):
        with of_stage(number):
            planned.append(
                (stage, plan_batch(stage, layout, saved and stage.training.global_batch_size))
            )
    return planned


def plan_batch(config: Config, layout: Layout, saved: int | None = None) -> BatchPlan:
    """The batch of this run; a resumed one keeps its global batch, `saved`, whatever the ranks.

    A pipeline takes all micro-batches of a step at once, and cuts the rows of a rank anew into as
    many as it wants. Raises `UserError` when the global batch does not divide.
    """
    training, micro, ranks = config.training, config.training.batch_size, layout.data_parallel
    asked, given = training.global_batch_size, training.gradient_accumulation_steps
    total = saved or asked or micro * (given or 1) * ranks
    rows = total // ranks
    if saved:
        micro = max(
            (size for size in range(1, min(micro, rows) + 1) if rows % size == 0), default=1
        )
    accumulation = pieces = max(
        rows // micro, 1
    )  # 1 where it does not divide, which is refused below
    if layout.pp > 1:
        stages = sum(map(len, held_stages(pipeline_order(config.parallelism)).values()))
        pieces = config.parallelism.pipeline_parallel_microbatches or max(accumulation, stages)
    refuse(
        {
            f"training.global_batch_size: {asked} is asked for, but the run in {config.job.dump_folder!r} was started with "
            f"{saved}: remove the setting, or choose another job.dump_folder": asked
            not in (None, saved or asked),
            f"the run was started with training.global_batch_size = {saved}, which {ranks} data-parallel ranks cannot "
            f"share evenly: resume with a number of ranks that divides {saved}": saved is not None
            and saved % ranks > 0,
            f"training.global_batch_size: {total} is no multiple of training.batch_size × data-parallel ranks = "
            f"{micro} × {ranks} = {micro * ranks}: change one of them": total % (micro * ranks) > 0,
            f"training.gradient_accumulation_steps: {given} does not fit training.global_batch_size = {total}, which "
            f"makes it {total} / ({micro} × {ranks}) = {accumulation}: give only one of the two": not saved
            and given not in (None, accumulation),
            "optimizer.early_step_in_backward: a step of several micro-batches (gradient accumulation, or a pipeline) has "
            "no gradient that is complete before its end: use one micro-batch, or drop the setting": config.optimizer.early_step_in_backward
            and (accumulation > 1 or layout.pp > 1),
            f"parallelism.pipeline_parallel_microbatches: a rank's {micro} × {accumulation} = {rows} sequences of a step "
            f"do not cut into {pieces} equal micro-batches: choose one that divides {rows}": rows
            % pieces
            > 0,
        }
    )
    if layout.pp > 1:
        pipeline_order(config.parallelism, pieces)  # refuses what the schedule cannot run
    if micro != training.batch_size:
        logger.info("micro-batches of %d keep the run's global batch of %d", micro, total)
    return BatchPlan(rows // pieces, pieces, total)


@dataclass
class TrainState:
    """Counters of a run. `step` is the number of steps done, `tokens` (`source_tokens`) those seen by all ranks.

    `stage` is that of the curriculum, `ranked` the step at which documents were last ranked by
    their loss.
    """

    source_tokens: list[int]
    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    best_loss: float = float("inf")
    best_step: int | None = None
    worse_validations: int = 0
    stage: int = 0
    ranked: int | None = None


@dataclass
class Interval:
    """What is measured from one log to the next; `started` is put off by the time that is not training."""

    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


def total_steps(config: Config, loader: Loader, global_batch: int, done: int = 0) -> int:
    """The length of a run in steps, of which `done` are: by `training.steps`, or until all epochs are trained.

    Raises `UserError` for a warmup that is longer.
    """
    steps = config.training.steps or done + -(-loader.rows_left // global_batch)
    refuse(dict.fromkeys(long_warmup(config.lr_scheduler, steps), True))
    return steps


def ranking_file(config: Config, step: int) -> str:
    """Where the ranking of a step is kept: how often each document was used by then, and its loss."""
    return os.path.join(str(config.job.dump_folder), "curriculum", f"step-{step}.npz")


def find_start(
    config: Config, folder: str, back: bool, process: Process
) -> tuple[str | None, dict[str, Any] | None]:
    """The checkpoint that the weights come from, if any, and its state where everything else does too.

    That is the newest complete checkpoint in `folder`, or with `back` that of
    `checkpoint.load_step`; `step-0` and `checkpoint.initial_load_path` give weights only. Raises
    `UserError` for one that cannot be used.
    """
    settings = config.checkpoint
    path = None
    if back:
        asked = checkpoint.checkpoint_path(folder, settings.load_step)
        path = checkpoint.require_complete(asked, "checkpoint.load_step", process)
    elif settings.enable_checkpoint:
        path = checkpoint.newest_complete(folder, process)
        done = [
            step for step in on_first(process, lambda: checkpoint.listed_steps(folder)) if step > 0
        ]
        lost = f"of the checkpoints in {folder} ({len(done)} beyond step 0) none is complete"
        mend = "put one back, or to start over on purpose move that folder away, or choose another job.dump_folder"
        seed = checkpoint.checkpoint_path(folder, 0)
        refuse({f"{lost}: {mend}": bool(done) and path in (None, seed)})
        if settings.load_step >= 0:
            again = "to go back once more, move the checkpoints after it away"
            logger.info(
                "step %d was gone back to by the start before: going on; %s",
                settings.load_step,
                again,
            )
    if path is not None and (state := read_state(path))["step"] > 0:
        wrong = f"checkpoint.load_step: {path} holds weights only (checkpoint.model_weights_only)"
        mend = f"start a new run with checkpoint.initial_load_path = {path!r}"
        refuse({f"{wrong}, so the run cannot go on from it: {mend}": "data" not in state})
        logger.info("resuming after step %d from %s", state["step"], path)
        return path, state
    if path is None and settings.initial_load_path:
        path = checkpoint.require_complete(
            settings.initial_load_path, "checkpoint.initial_load_path", process
        )
    if path is not None:
        logger.info("starting from the weights in %s", path)
    return path, None


class Run:
    """The parts of a run, put where the newest checkpoint left them, and the moving parts of the loop over them.

    Raises `UserError` for whatever the configuration or the data get wrong.
    """

    interval: Interval
    pending: tuple[list[str], torch.Tensor, Any] | None = None
    stopping = save_wanted = False
    after_checkpoint: Callable[[], None] | None = None
    skipped_in_a_row = 0

    def __init__(self, config: Config, process: Process, console: Console) -> None:
        self.config, self.process = config, process
        self.objective = find_objective(config.job.task)
        if config.training.deterministic:
            os.environ.setdefault(
                "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
            )  # before the first matrix product
            torch.use_deterministic_algorithms(True)
        layout = resolve_layout(config, process.world_size)
        mesh = build_mesh(layout, process.device.type)
        folder = os.path.join(str(config.job.dump_folder), config.checkpoint.folder)
        on_first(process, lambda: checkpoint.prepare_folder(folder))
        back = config.checkpoint.enable_checkpoint and on_first(process, lambda: goes_back(config))
        start, saved = find_start(config, folder, back, process)
        self.stages = plan_stages(config, layout, saved and saved["global_batch"])
        config, plan = self.config, self.plan = self.stages[0]
        tokenizer = self.tokenizer = run_tokenizer(config)
        self.objective.check(config, tokenizer)
        self.data_rank = mesh.data_rank
        self.loader = build_loader(config, tokenizer, plan, mesh.data_rank)
        sources = self.loader.plan.sources  # of all stages
        inputs = on_first(process, lambda: inputs_of(config, tokenizer, sources))
        self.state = TrainState([0] * len(config.data.resolved_sources()))
        before = saved and saved.get("started_with")
        if saved is not None:
            self.go_on_from(saved)
        if before:
            refuse_other_inputs(before["inputs"], inputs, str(start))
        self.total_steps = total_steps(config, self.loader, plan.global_batch, self.state.step)
        if back:
            on_first(process, lambda: set_aside(config, folder))
        settings = to_toml(config)
        on_first(
            process,
            lambda: replace_text(Path(str(config.job.dump_folder), "config.toml"), settings),
        )
        if config.job.print_args and process.rank == 0:
            print(settings)
        self.load_model(mesh, start, saved)
        own = {
            "settings": settings_of(config),
            "inputs": inputs,
            "model": described(self.built.model.config),
        }
        self.started_with = own
        if before:
            say_changes(
                before,
                own,
                self.state.step,
                learning_rate(config, self.state.step, self.total_steps),
            )
        wanted = config.validation.resolved_source()
        self.validation = wanted and build_validation(config, tokenizer, plan, mesh.data_rank)
        self.objective.prepare(self.built, self.all_batches)
        self.saver = checkpoint.CheckpointSaver(config, folder, self.describe, process)
        self.metrics = MetricWriter(
            config, process.rank, console, self.state.step, self.total_steps
        )
        self.first_step, self.saved_step = self.state.step + 1, self.state.step
        self.peak_flops = peak_flops(process.device)

    def go_on_from(self, saved: dict[str, Any]) -> None:
        """Puts the counters and the data where a checkpoint's state has them; refuses data of other samples."""
        self.state = TrainState(**saved["counters"])
        if self.state.stage or self.state.ranked is not None:
            self.open_data()
        self.skipped_in_a_row = saved.get("skipped_in_a_row", 0)
        self.objective.load_state_dict(saved.get("objective", {}))
        self.loader.load_state_dict(saved["data"])

    def all_batches(self) -> Iterator[Batch]:
        """This rank's micro-batches of one pass over the training data, then of the held-out data."""
        yield from self.loader.every_batch()
        if self.validation is not None:
            yield from self.validation()

    def load_model(self, mesh: Mesh, start: str | None, saved: dict[str, Any] | None) -> None:
        """Builds the model and its optimizer, with the weights of the checkpoint `start`, and moments where `saved`."""
        config = self.config
        fill = start is None or config.lora.rank > 0  # checkpoints hold nothing that is frozen
        if start is not None:  # what adapters began from, which may be gone, is part of it
            config = config.model_copy(
                update={"lora": config.lora.model_copy(update={"adapter": (), "init": "zero"})}
            )
        self.built = build_model(config, self.tokenizer, mesh, self.process.device, fill)
        self.optimizer = build_optimizer(self.built.model, config)
        if start is not None:
            moments = {} if saved is None else optimizer_tensors(self.built.model, self.optimizer)
            checkpoint.read_tensors(
                start, checkpoint.model_tensors(self.built.model) | moments, self.process
            )

    def describe(self, folder: str) -> None:
        """Writes to `folder` what its tensors alone do not tell: the model's configuration, tokenizer, and adapter."""
        model, source = self.built.model, self.config.model.name_or_path
        save_model_description(model.config, self.tokenizer, source, folder)
        if self.config.lora.rank:
            Path(folder, checkpoint.RUN).write_text(
                to_toml(self.config)
            )  # which says what it was trained beside

    def exports(self, folder: str) -> list[Callable[[], None]]:
        """What writes the model as it is to `folder`, and then its adapter beside it. All ranks must call each."""
        config, name, model = self.config, self.config.model.name_or_path, self.built.model
        dtype, beside = (
            getattr(torch, config.checkpoint.export_dtype),
            os.path.join(folder, "adapter"),
        )
        writers = [partial(export_model, model, self.tokenizer, folder, dtype, name)]
        if config.lora.rank:
            writers.append(
                partial(export_adapter, model, self.tokenizer, config.lora, name, beside)
            )
        return writers

    def open_data(self) -> None:
        """Opens the training data of the present stage and ranking, from its beginning."""
        config, self.plan = self.stages[self.state.stage]
        order = None
        if self.state.ranked is not None:
            file = ranking_file(config, self.state.ranked)
            lost = (
                f"curriculum.rank_every: the order that the run goes by cannot be read from {file}"
            )
            kinds = (OSError, ValueError, EOFError, BadZipFile)
            with (
                explained(lost, *kinds, mend="put it back, or start anew"),
                np.load(file) as ranking,
            ):
                order = np.lexsort((ranking["losses"], ranking["uses"]))
        earlier = self.loader
        earlier.close()
        self.loader = build_loader(config, self.tokenizer, self.plan, self.data_rank, order)
        self.loader.take_place_of(earlier)
