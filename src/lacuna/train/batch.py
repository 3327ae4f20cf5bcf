"""How many sequences a step trains on, and how they are cut into micro-batches."""

import logging
from dataclasses import dataclass

from lacuna.config import Config, UserError
from lacuna.parallel.mesh import Layout
from lacuna.parallel.schedule import held_stages, pipeline_order

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchPlan:
    """`global_batch` sequences a step = `micro_batch` × `accumulation` × data-parallel ranks."""

    micro_batch: int
    accumulation: int
    global_batch: int


def plan_batch(config: Config, layout: Layout, saved_global_batch: int | None = None) -> BatchPlan:
    """The batch of this run; a resumed one keeps its global batch, whatever the ranks.

    A pipeline takes all micro-batches of a step at once, and cuts the rows of a rank anew into as many as it wants.
    Raises `UserError` when the global batch does not divide.
    """
    plan = _plan(config, layout.data_parallel, saved_global_batch)
    if config.optimizer.early_step_in_backward and (plan.accumulation > 1 or layout.pp > 1):
        raise UserError(
            "optimizer.early_step_in_backward: a step of several micro-batches (gradient accumulation, or a pipeline) "
            "has no gradient that is complete before its end: use one micro-batch, or drop the setting."
        )
    if layout.pp == 1:
        return plan
    rows, stages = plan.micro_batch * plan.accumulation, held_stages(pipeline_order(config.parallelism))
    wanted = config.parallelism.pipeline_parallel_microbatches
    wanted = wanted or max(plan.accumulation, sum(map(len, stages.values())))
    if rows % wanted:
        raise UserError(
            f"parallelism.pipeline_parallel_microbatches: the {plan.micro_batch} × {plan.accumulation} = {rows} "
            f"sequences of a rank's step (training.batch_size × accumulation) cannot be cut into {wanted} equal "
            f"micro-batches: choose a number that divides {rows}, or another batch."
        )
    pipeline_order(config.parallelism, wanted)  # refuses what the schedule cannot run
    return BatchPlan(rows // wanted, wanted, plan.global_batch)


def _plan(config: Config, data_parallel: int, saved_global_batch: int | None) -> BatchPlan:
    training = config.training
    micro = training.batch_size
    if saved_global_batch is not None:
        asked = training.global_batch_size
        if asked is not None and asked != saved_global_batch:
            raise UserError(
                f"training.global_batch_size: {asked} is asked for, but the run in job.dump_folder = "
                f"{config.job.dump_folder!r} was started with {saved_global_batch}: remove the setting, or start "
                f"in another job.dump_folder."
            )
        return _resumed_plan(micro, data_parallel, saved_global_batch)
    if training.global_batch_size is None:
        accumulation = training.gradient_accumulation_steps or 1
        return BatchPlan(micro, accumulation, micro * accumulation * data_parallel)
    total = training.global_batch_size
    if total % (micro * data_parallel):
        raise UserError(
            f"training.global_batch_size: {total} is no multiple of training.batch_size × data-parallel ranks = "
            f"{micro} × {data_parallel} = {micro * data_parallel}: change one of them."
        )
    accumulation = total // (micro * data_parallel)
    given = training.gradient_accumulation_steps
    if given is not None and given != accumulation:
        raise UserError(
            f"training.gradient_accumulation_steps: {given} does not fit training.global_batch_size = {total}, which "
            f"makes it {total} / ({micro} × {data_parallel}) = {accumulation}: give only one of the two."
        )
    return BatchPlan(micro, accumulation, total)


def _resumed_plan(micro: int, data_parallel: int, total: int) -> BatchPlan:
    if total % data_parallel:
        raise UserError(
            f"the run was started with training.global_batch_size = {total}, which {data_parallel} data-parallel "
            f"ranks cannot share evenly: resume with a number of ranks that divides {total}."
        )
    share = total // data_parallel
    fitting = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
    if fitting != micro:
        logger.info("micro-batches of %d instead of %d keep the run's global batch of %d", fitting, micro, total)
    return BatchPlan(fitting, share // fitting, total)
