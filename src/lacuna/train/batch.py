"""How many sequences a step trains on, and how they are cut into micro-batches."""

import logging
from dataclasses import dataclass

from lacuna.config import Config, refuse
from lacuna.parallel.mesh import Layout
from lacuna.parallel.schedule import held_stages, pipeline_order

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchPlan:
    """`global_batch` sequences a step = `micro_batch` × `accumulation` × data-parallel ranks."""

    micro_batch: int
    accumulation: int
    global_batch: int


def plan_batch(config: Config, layout: Layout, saved: int | None = None) -> BatchPlan:
    """The batch of this run; a resumed one keeps its global batch, `saved`, whatever the ranks.

    A pipeline takes all micro-batches of a step at once, and cuts the rows of a rank anew into as many as it wants.
    Raises `UserError` when the global batch does not divide.
    """
    training, micro, ranks = config.training, config.training.batch_size, layout.data_parallel
    asked, given = training.global_batch_size, training.gradient_accumulation_steps
    total = saved or asked or micro * (given or 1) * ranks
    rows = total // ranks
    if saved:
        micro = max((size for size in range(1, min(micro, rows) + 1) if rows % size == 0), default=1)
    accumulation = pieces = max(rows // micro, 1)  # 1 where it does not divide, which is refused below
    if layout.pp > 1:
        stages = sum(map(len, held_stages(pipeline_order(config.parallelism)).values()))
        pieces = config.parallelism.pipeline_parallel_microbatches or max(accumulation, stages)
    reasons = {
        f"training.global_batch_size: {asked} is asked for, but the run in {config.job.dump_folder!r} was started with "
        f"{saved}: remove the setting, or choose another job.dump_folder": saved is not None
        and asked not in (None, saved),
        f"the run was started with training.global_batch_size = {saved}, which {ranks} data-parallel ranks cannot "
        f"share evenly: resume with a number of ranks that divides {saved}": saved is not None and saved % ranks > 0,
        f"training.global_batch_size: {total} is no multiple of training.batch_size × data-parallel ranks = "
        f"{micro} × {ranks} = {micro * ranks}: change one of them": total % (micro * ranks) > 0,
        f"training.gradient_accumulation_steps: {given} does not fit training.global_batch_size = {total}, which "
        f"makes it {total} / ({micro} × {ranks}) = {accumulation}: give only one of the two": (
            saved is None and given not in (None, accumulation)
        ),
        "optimizer.early_step_in_backward: a step of several micro-batches (gradient accumulation, or a pipeline) has "
        "no gradient that is complete before its end: use one micro-batch, or drop the setting": (
            config.optimizer.early_step_in_backward and (accumulation > 1 or layout.pp > 1)
        ),
        f"parallelism.pipeline_parallel_microbatches: a rank's {micro} × {accumulation} = {rows} sequences of a step "
        f"do not cut into {pieces} equal micro-batches: choose one that divides {rows}": rows % pieces > 0,
    }
    refuse(reasons)
    if layout.pp > 1:
        pipeline_order(config.parallelism, pieces)  # refuses what the schedule cannot run
    if micro != training.batch_size:
        message = "micro-batches of %d instead of %d keep the run's global batch of %d"
        logger.info(message, micro, training.batch_size, total)
    return BatchPlan(rows // pieces, pieces, total)
