"""The curriculum: between two steps, data are opened anew for a stage or in another order."""

import os
from zipfile import BadZipFile

import numpy as np

from lacuna.config import explained, logger
from lacuna.data import build_loader
from lacuna.data.disk import sync
from lacuna.data.rows import documents_begun
from lacuna.parallel.processes import on_first
from lacuna.train.setup import Run
from lacuna.train.step import document_losses


def advance_curriculum(run: Run, loss: float) -> None:
    """Begins the stages that are due by the steps done or the validation `loss`.

    Ranks the documents too, where that is due. After either, the data are opened anew.
    """
    state = run.state
    settings = run.config.curriculum
    before = state.curriculum_stage
    for stage in settings.stages[before:]:
        by_step = state.step >= (stage.from_step or np.inf)
        by_loss = loss <= (stage.from_loss or -np.inf)
        if not (by_step or by_loss):
            break
        state.curriculum_stage += 1
        number = state.curriculum_stage
        logger.info("stage %d of the curriculum begins after step %d", number, state.step)
    every = settings.rank_every
    is_due = every is not None and state.step % every == 0 and state.ranked != state.step
    if is_due:
        _rank_documents(run)
    if is_due or state.curriculum_stage > before:
        reopen_data(run)


def reopen_data(run: Run) -> None:
    """Opens the training data of the present stage and ranking, from its beginning."""
    config, run.batch = run.curriculum[run.state.curriculum_stage]
    order = None
    if run.state.ranked is not None:
        order = _ranked_order(_ranking_file(run, run.state.ranked))
    earlier = run.loader
    earlier.close()
    run.loader = build_loader(config, run.tokenizer, run.batch, run.data_rank, order)
    run.loader.take_place_of(earlier)


def _ranking_file(run: Run, step: int) -> str:
    """The file of a step's ranking: how often each document was used by then, and its loss."""
    return os.path.join(run.config.job.dump_folder, "curriculum", f"step-{step}.npz")


def _ranked_order(file: str) -> np.ndarray:
    """The documents by how often they were used, then by their loss, int64 [documents]."""
    lost = f"curriculum.rank_every: the order that the run goes by cannot be read from {file}"
    kinds = (OSError, ValueError, EOFError, BadZipFile)
    with explained(lost, *kinds, mend="put it back, or start anew"), np.load(file) as ranking:
        return np.lexsort((ranking["losses"], ranking["uses"]))


def _rank_documents(run: Run) -> None:
    """Measures the loss of the documents that this pass has left, and writes it to the run folder.

    How often each document was used is written too, and comes first in the order. Documents that no
    pass begins (empty or too long ones) come last.
    """
    state = run.state
    plan = run.loader.plan
    assert plan.rows_per_pass is not None, "only what is tokenised at the start is ranked"
    usable = documents_begun(plan, plan.rows_per_pass) > 0
    uses = np.where(usable, 0, np.inf)
    losses = np.full(len(usable), np.nan)
    if state.ranked is not None:
        with np.load(_ranking_file(run, state.ranked)) as before:
            uses = before["uses"]
            losses = before["losses"]
    uses = uses + run.loader.documents_begun()
    begun = usable & (uses == uses.max(where=usable, initial=0))
    left = np.flatnonzero(usable if begun.sum() == usable.sum() else usable & ~begun)
    losses[left] = document_losses(run.built, plan, left, run.objective)
    state.ranked = state.step
    path = _ranking_file(run, state.step)
    on_first(run.process, lambda: _write_ranking(path, uses, losses))
    mean = np.nanmean(losses[left])
    logger.info("step %d: %d documents ranked, loss %.3f on average", state.step, len(left), mean)


def _write_ranking(path: str, uses: np.ndarray, losses: np.ndarray) -> None:
    """Writes a ranking, whole or not at all."""
    new = f"{path}.new.npz"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    np.savez(new, uses=uses, losses=losses)
    sync(new)
    os.replace(new, path)
    sync(os.path.dirname(path))
