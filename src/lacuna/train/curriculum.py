"""A run on its way through its data: the stage that is due, and documents ranked by the model's own loss on them."""

import os

import numpy as np

from lacuna.config import logger
from lacuna.data.rows import documents_begun
from lacuna.parallel.processes import on_first
from lacuna.train.setup import Run, ranking_file
from lacuna.train.step import document_losses


def follow(run: Run, loss: float = np.inf) -> None:
    """Between two steps: opens the data anew where a stage begins, by the steps done or the validation `loss`.

    So it does where a ranking is due, which it makes first.
    """
    state, settings, stage = run.state, run.config.curriculum, run.state.stage
    if state.step >= run.total_steps:
        return
    for begins in settings.stages[stage:]:
        if state.step < (begins.from_step or np.inf) and not loss <= (begins.from_loss or -np.inf):
            break
        state.stage += 1
        logger.info("stage %d of the curriculum begins after step %d", state.stage, state.step)
    ranking = settings.rank_every is not None and state.step % settings.rank_every == 0 and state.ranked != state.step
    if ranking:
        _rank(run)
    if ranking or state.stage > stage:
        run.open_data()


def _rank(run: Run) -> None:
    """Measures the loss of the documents that this pass has left, and writes it to the run folder.

    Beside it goes how often each document was used, which comes first in the order; those of which no pass begins any
    (empty ones, or too long) are last.
    """
    state, plan = run.state, run.loader.plan
    usable = documents_begun(plan, plan.rows_per_pass) > 0
    uses, losses = np.where(usable, 0, np.inf), np.full(len(usable), np.nan)
    if state.ranked is not None:
        with np.load(ranking_file(run.config, state.ranked)) as before:
            uses, losses = before["uses"], before["losses"]
    uses = uses + run.loader.documents_begun()
    begun = usable & (uses == uses.max(where=usable, initial=0))
    left = np.flatnonzero(usable if begun.sum() == usable.sum() else usable & ~begun)
    losses[left] = document_losses(run.built, run.loader.plan, left)
    state.ranked = state.step
    path = ranking_file(run.config, state.step)

    def write() -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        np.savez(f"{path}.new.npz", uses=uses, losses=losses)
        os.replace(f"{path}.new.npz", path)

    on_first(run.process, write)
    logger.info("step %d: %d documents ranked, loss %.3f on average", state.step, len(left), np.nanmean(losses[left]))
