"""The batch of a step, as settings and layout make it, and the number of steps."""

from lacuna.config import Config, UserError, in_curriculum_stage, logger
from lacuna.config.checks import long_warmup
from lacuna.config.machine import ParallelismConfig
from lacuna.config.optimizers import LRSchedulerConfig, OptimizerConfig
from lacuna.config.sections import TrainingConfig
from lacuna.data import BatchSizes
from lacuna.parallel.mesh import Layout
from lacuna.parallel.schedule import held_stages, pipeline_order


def curriculum_batches(
    config: Config, layout: Layout, saved: int | None = None
) -> list[tuple[Config, BatchSizes]]:
    """The configuration and the batch of each stage of the curriculum.

    The first stage is the one before all tables, and without a curriculum the only one. `saved` is
    its global batch, where a run is resumed. Raises `UserError` as `resolve_batch` does.
    """
    folder = str(config.job.dump_folder)
    batch = resolve_batch(
        config.training, config.parallelism, config.optimizer, layout, saved, folder
    )
    resolved = {
        "batch_size": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "global_batch_size": batch.global_batch,
    }
    training = config.training.model_copy(update=resolved)
    first = config.model_copy(update={"training": training})
    batches = [(first, batch)]
    for number, later in enumerate(first.curriculum_stages()[1:], start=1):
        with in_curriculum_stage(number):
            saved_later = later.training.global_batch_size if saved else None
            batch = resolve_batch(
                later.training, later.parallelism, later.optimizer, layout, saved_later, folder
            )
            batches.append((later, batch))
    return batches


def resolve_batch(
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    optimizer: OptimizerConfig,
    layout: Layout,
    saved: int | None = None,
    folder: str = "",
) -> BatchSizes:
    """The batch of a run.

    A run that is resumed from a `folder` keeps its global batch, `saved`, on any number of ranks. A
    pipeline takes all micro-batches of a step at once, and cuts the rows of a rank into as many as
    it needs. Raises `UserError` when the global batch does not divide.
    """
    ranks = layout.data_parallel
    given = training.gradient_accumulation_steps or 1
    total = saved or training.global_batch_size or training.batch_size * given * ranks
    rows = total // ranks
    micro = training.batch_size
    if saved:
        divisors = (size for size in range(1, min(micro, rows) + 1) if rows % size == 0)
        micro = max(divisors, default=1)
    accumulation = max(rows // micro, 1)  # 1 where it does not divide, which is refused below
    pieces = accumulation
    if layout.pp > 1:
        pieces = pipeline_microbatches(parallelism, accumulation)
    _check_global_batch(training, folder, total, micro, ranks, saved)
    if not saved and training.gradient_accumulation_steps not in (None, accumulation):
        raise UserError(
            f"training.gradient_accumulation_steps: {given} does not fit "
            f"training.global_batch_size = {total}, which makes it {total} / ({micro} × {ranks}) "
            f"= {accumulation}: give only one of the two."
        )
    if accumulation > 1 or layout.pp > 1:
        _refuse_early_step(optimizer)
    if rows % pieces:
        raise UserError(
            f"parallelism.pipeline_parallel_microbatches: a rank's {micro} × {accumulation} = "
            f"{rows} sequences of a step do not cut into {pieces} equal micro-batches: choose one "
            f"that divides {rows}."
        )
    if layout.pp > 1:
        pipeline_order(parallelism, pieces)  # refuses what the schedule cannot run
    if micro != training.batch_size:
        logger.info("micro-batches of %d keep the run's global batch of %d", micro, total)
    return BatchSizes(rows // pieces, pieces, total)


def _refuse_early_step(optimizer: OptimizerConfig) -> None:
    """Raises `UserError` where a step has no gradient that is complete before its end."""
    if optimizer.early_step_in_backward:
        raise UserError(
            "optimizer.early_step_in_backward: a step of several micro-batches (gradient "
            "accumulation, or a pipeline) has no gradient that is complete before its end: use one "
            "micro-batch, or drop the setting."
        )


def pipeline_microbatches(settings: ParallelismConfig, accumulation: int) -> int:
    """The number of micro-batches into which a pipeline cuts the rows of a rank.

    Where no setting says it, it is at least one for each stage.
    """
    stages = sum(map(len, held_stages(pipeline_order(settings)).values()))
    return settings.pipeline_parallel_microbatches or max(accumulation, stages)


def _check_global_batch(
    training: TrainingConfig,
    folder: str,
    total: int,
    micro: int,
    ranks: int,
    saved: int | None,
) -> None:
    """Raises `UserError` when the global batch is not the `saved` one, or cannot be shared."""
    asked = training.global_batch_size
    if saved and asked not in (None, saved):
        raise UserError(
            f"training.global_batch_size: {asked} is asked for, but the run in {folder!r} was "
            f"started with {saved}: remove the setting, or choose another job.dump_folder."
        )
    if saved and saved % ranks:
        raise UserError(
            f"the run was started with training.global_batch_size = {saved}, which {ranks} "
            f"data-parallel ranks cannot share evenly: resume with a number of ranks that divides "
            f"{saved}."
        )
    if total % (micro * ranks):
        raise UserError(
            f"training.global_batch_size: {total} is no multiple of training.batch_size × "
            f"data-parallel ranks = {micro} × {ranks} = {micro * ranks}: change one of them."
        )


def total_steps(
    training: TrainingConfig,
    lr_scheduler: LRSchedulerConfig,
    rows_left: int | None,
    global_batch: int,
    done: int = 0,
) -> int:
    """The number of steps of a run, of which `done` are behind it.

    It is `training.steps`, or as many as it takes to end all epochs, of which `rows_left` rows are
    left. Raises `UserError` for a warmup that is longer.
    """
    steps = training.steps
    if steps is None:
        assert rows_left is not None, "epochs have an end"
        steps = done + -(-rows_left // global_batch)
    for problem in long_warmup(lr_scheduler, steps):
        raise UserError(f"{problem}.")
    return steps
