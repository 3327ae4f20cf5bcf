"""Everything a run needs, made in the right order from its configuration, its batches first."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from lacuna.config import Config, to_toml
from lacuna.config.learning_rate import learning_rate
from lacuna.data import Batch, build_loader, build_validation, merge_states, run_tokenizer
from lacuna.data.disk import replace_text
from lacuna.formats.checkpoint import RUN, model_tensors, prepare_folder
from lacuna.formats.huggingface import save_model_description
from lacuna.formats.reader import read_tensors
from lacuna.model.architecture import load_model_config
from lacuna.model.build import build_model
from lacuna.objective.find import find_objective
from lacuna.parallel.batch import curriculum_batches, total_steps
from lacuna.parallel.mesh import Mesh, build_mesh, resolve_layout
from lacuna.parallel.processes import Process, gather_objects, on_first
from lacuna.train.metrics import MetricWriter, peak_flops
from lacuna.train.optimizer import WholeWeights, build_optimizer, optimizer_tensors
from lacuna.train.resume import (
    inputs_of,
    log_changes,
    require_same_inputs,
    shown_configuration,
    shown_settings,
    way_to_start_anew,
)
from lacuna.train.saver import CheckpointSaver
from lacuna.train.start import find_start, goes_back
from lacuna.train.state import Interval, Start, TrainState

if TYPE_CHECKING:  # an extension
    from lacuna.train.second import Learner


class Run:
    """The parts of a run, as the newest checkpoint left them, and what its loop changes.

    Raises `UserError` for whatever the configuration or the data get wrong.
    """

    interval: Interval
    pending: tuple[list[str], torch.Tensor, Any] | None = None
    stopping = False
    save_wanted = False
    after_checkpoint: Callable[[], None] | None = None
    second: "Learner | None" = None
    skipped_in_a_row = 0
    router_load: Any = None  # a `RouterLoad` where the load of experts is counted
    looks: Any = None  # `Looks` where attention is looked at
    recorded: Any = None  # `RecordedSteps` where steps are recorded
    halves: Any = WholeWeights()  # `SplitWeights` where they are in halves

    def __init__(self, config: Config, process: Process, console: Console) -> None:
        self.process = process
        self.start = Start()
        self.start.end_phase("libraries")
        self.objective = find_objective(config.job.task, config.trains_on)
        if config.training.deterministic:
            # Before the first matrix product.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        layout = resolve_layout(config.parallelism, process.world_size)
        mesh = build_mesh(layout, process.device.type)
        self.data_rank = mesh.data_rank
        checkpoints = os.path.join(config.job.dump_folder, config.checkpoint.folder)
        on_first(process, lambda: prepare_folder(checkpoints))
        folder = config.job.dump_folder
        back_to = config.checkpoint.load_step
        back = config.checkpoint.enable_checkpoint and on_first(
            process, lambda: goes_back(folder, back_to)
        )
        start, saved = find_start(config.checkpoint, checkpoints, back, process)
        loop: dict[str, Any] = {} if saved is None else saved["loop"]
        self.curriculum = curriculum_batches(config, layout, loop.get("global_batch"))
        started_with = loop.get("started_with")
        self.config, self.batch = self.curriculum[0]
        self.open_data(saved, started_with, str(start))
        self.start.end_phase("data")
        if start is not None:
            self.refuse_another_model(start, is_resumed=saved is not None)
        if back:
            from lacuna.train.branch import set_aside_later_steps  # an extension

            on_first(process, lambda: set_aside_later_steps(folder, checkpoints, back_to))
        self.write_settings()
        self.load_model(mesh, start, saved)
        self.start.end_phase("model")
        self.say_what_changed(started_with)
        self.validation = None
        if config.validation.resolved_source():
            parts = (self.config, self.tokenizer, self.batch, self.data_rank)
            self.validation = build_validation(*parts)
        self.prepare_objective(start if saved is not None else None)
        self.saver = CheckpointSaver(config.checkpoint, checkpoints, self.describe, process)
        self.peak_flops = peak_flops(process.device)
        self.watch_model()
        self.halve_weights()
        self.open_metrics(console)
        self.first_step = self.state.step + 1
        self.saved_step = self.state.step

    def open_data(
        self, saved: dict[str, Any] | None, started_with: dict[str, Any] | None, path: str
    ) -> None:
        """Opens the data, goes on from the state `saved` in `path`, and finds the run's length.

        Refuses data that are not those that the run was `started_with`.
        """
        config = self.config
        self.tokenizer = run_tokenizer(config.model, config.conversations)
        day = (started_with or {}).get("day")
        if config.conversations is not None:
            from lacuna.data import template  # an extension

            day = day or on_first(self.process, template.today)
            template.keep_day(self.tokenizer, day)
        self.objective.check(config, self.tokenizer)
        self.loader = build_loader(config, self.tokenizer, self.batch, self.data_rank)
        sources = self.loader.plan.sources  # of all stages of the curriculum
        parts = config, self.objective, self.tokenizer, sources
        inputs = on_first(self.process, lambda: inputs_of(*parts))
        settings = shown_settings(config.model_dump())
        self.started_with: dict[str, Any] = {"settings": settings, "inputs": inputs, "day": day}
        self.state = TrainState([0] * len(config.data.resolved_sources()))
        if saved is not None:
            self.load_state_dict(saved)
        if started_with:
            way = partial(way_to_start_anew, config, self.objective, self.tokenizer, path)
            require_same_inputs(started_with["inputs"], inputs, way)
        rows_left = self.loader.rows_left
        self.total_steps = total_steps(
            config.training,
            config.lr_scheduler,
            rows_left,
            self.batch.global_batch,
            self.state.step,
        )

    def refuse_another_model(self, start: str, is_resumed: bool) -> None:
        """Refuses the checkpoint `start` with other attention or base than it was trained with."""
        if self.config.lora.rank and not is_resumed:
            from lacuna.formats.adapter import require_same_base  # an extension

            base = self.config.model.name_or_path
            require_same_base(start, self.config.lora, base, self.config.training.seed)
        from lacuna.train.same_attention import require_same_attention  # an extension

        model_config = load_model_config(self.config.model, self.tokenizer)
        require_same_attention(start, self.config.model.attention, model_config, is_resumed)

    def write_settings(self) -> None:
        """Writes every resolved setting to the run folder, and prints them if that is asked for."""
        settings = to_toml(self.config)
        path = Path(self.config.job.dump_folder, "config.toml")
        on_first(self.process, lambda: replace_text(path, settings))
        if self.config.job.print_args and self.process.rank == 0:
            print(settings)

    def open_metrics(self, console: Console) -> None:
        """Opens whatever the run reports to, `console` among it."""
        config = self.config
        self.metrics = MetricWriter(
            config.metrics,
            config.job.name,
            config.job.dump_folder,
            config.conversations is not None,
            bool(config.validation.prompts),
            self.process.rank,
            console,
            self.state.step,
            self.total_steps,
            told=config.model_dump(),
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the loop, the source and the objective; all ranks must call it."""
        rate = self.optimizer.param_groups[0]["lr"]
        return {
            "loop": self.loop_state() | {"started_with": self.started_with | {"rate": rate}},
            "source": merge_states(gather_objects(self.process, self.loader.state_dict())),
            "objective": self.objective.state_dict(),
        }

    def loop_state(self) -> dict[str, Any]:
        """The part of the saved state that says how far the run is."""
        return {
            "step": self.state.step,
            "counters": vars(self.state).copy(),
            "global_batch": self.curriculum[0][1].global_batch,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Sets the loop, the data and the objective to a checkpoint's state.

        Refuses a state that belongs to other samples.
        """
        loop = saved["loop"]
        self.state = TrainState(**loop["counters"])
        self.skipped_in_a_row = loop.get("skipped_in_a_row", 0)
        if self.state.curriculum_stage or self.state.ranked is not None:
            from lacuna.train.curriculum import reopen_data  # an extension

            reopen_data(self)
        self.loader.load_state_dict(saved["source"])  # refuses another task, whose state is other
        self.objective.load_state_dict(saved["objective"])

    def all_batches(self) -> Iterator[Batch]:
        """This rank's micro-batches of a pass over the training data, then of the held-out data."""
        yield from self.loader.every_batch()
        if self.validation is not None:
            yield from self.validation()

    def load_model(self, mesh: Mesh, start: str | None, saved: dict[str, Any] | None) -> None:
        """Builds the model, with the weights of the checkpoint `start`, and its optimizer.

        The optimizer gets its moments where there is a state `saved`.
        """
        config = self.config
        fill = start is None or config.lora.rank > 0  # checkpoints hold nothing that is frozen
        if start is not None:  # which holds what adapters began from
            lora = config.lora.model_copy(update={"adapter": (), "init": "zero"})
            config = config.model_copy(update={"lora": lora})
        self.built = build_model(config, self.tokenizer, mesh, self.process.device, fill)
        model = self.built.model
        decay_head = not config.model.train_new_tokens_only
        self.optimizer = build_optimizer(model, config.optimizer, decay_head)
        if start is not None:
            tensors = model_tensors(model)
            if saved is not None:
                tensors |= optimizer_tensors(model, self.optimizer)
            read_tensors(start, tensors, self.process)

    def prepare_objective(self, start: str | None) -> None:
        """Gives the objective what it needs, and opens a second model that it trains.

        Where the run goes on from a checkpoint, that model is as `start` has it.
        """
        second = self.objective.prepare(self.built, self.all_batches)
        if second is not None:
            from lacuna.train.second import open_learner  # an extension

            self.second = open_learner(second, self.config.optimizer, start, self.process)

    def watch_model(self) -> None:
        """Has the model watched as the settings ask: its attention, and what experts are given."""
        settings = self.config.model.router_bias_update_rate, self.config.metrics.router
        if any(settings):
            from lacuna.model.router_load import RouterLoad  # an extension

            self.router_load = RouterLoad(self.built, *settings)
        if self.validation is not None and self.config.metrics.attention:
            from lacuna.train.looks import Looks  # an extension

            self.looks = Looks(self.built, self.validation, self.batch)
        wanted = self.config.compile.cuda_graphs
        if self.config.records_steps and (wanted or self.process.device.type == "cuda"):
            from lacuna.train.recording_choice import recorded_steps  # an extension

            how = self.config.training, self.built, self.objective.loss, self.peak_flops
            counts = self.router_load is not None
            masks = self.config.data.document_mask
            self.recorded = recorded_steps(wanted, *how, masks, counts)

    def halve_weights(self) -> None:
        """Has weights kept in halves, in place, where AdamW's own kernel updates them."""
        has_kernel = hasattr(self.optimizer, "rests")
        if has_kernel and self.recorded is None and self.config.may_halve_weights:
            from lacuna.train.split_weights import split_weights  # an extension

            self.halves = split_weights(self.built, self.optimizer)  # type: ignore[arg-type]

    def say_what_changed(self, started_with: dict[str, Any] | None) -> None:
        """Logs what a resumed run goes on with that differs from what it was `started_with`."""
        self.started_with["model"] = shown_configuration(self.built.model.config)
        if started_with:
            step = self.state.step
            schedule = self.config.lr_scheduler
            rate = learning_rate(self.config.optimizer.lr, schedule, step, self.total_steps)
            log_changes(started_with, self.started_with, step, rate)

    def describe(self, folder: str) -> None:
        """Writes to `folder` what the tensors of a checkpoint alone do not tell.

        That is the model's configuration, its tokenizer, and what adapters were trained beside.
        """
        source = self.config.model.name_or_path
        save_model_description(self.built.model.config, self.tokenizer, source, folder)
        if self.config.lora.rank:
            Path(folder, RUN).write_text(to_toml(self.config))
