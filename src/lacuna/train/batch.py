"""How many sequences a step trains on, and how they are cut into micro-batches."""

import logging
from dataclasses import dataclass

from lacuna.config import Config, UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchPlan:
    """`global_batch` sequences a step = `micro_batch` × `accumulation` × data-parallel ranks."""

    micro_batch: int
    accumulation: int
    global_batch: int


def plan_batch(config: Config, data_parallel: int, saved_global_batch: int | None = None) -> BatchPlan:
    """The batch of this run; a resumed one keeps its global batch, whatever the ranks.

    Raises `UserError` when the global batch does not divide.
    """
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
