"""The one loop: step, log, validate, follow the curriculum, save."""

import gc
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config import RunError, logger
from lacuna.data import Batch, merge_states
from lacuna.data.disk import sync
from lacuna.data.mixture import random_key
from lacuna.data.rows import documents_begun
from lacuna.parallel.processes import gather_objects, on_first, tighten_timeout
from lacuna.train.checkpoint import model_tensors
from lacuna.train.metrics import peak_memory, profiled
from lacuna.train.optimizer import learning_rate, optimizer_tensors, update
from lacuna.train.setup import Interval, Run, ranking_file
from lacuna.train.step import accumulate_gradients, document_losses, evaluate, total_counts


def train(run: Run, stop: list[int]) -> bool:
    """Trains to the end or until a signal is in `stop`. Returns whether it came to the end.

    Raises `RunError` when the loss stops being finite, too many steps in a row are skipped, or a
    disk is full.
    """
    gc.collect()
    gc.disable()  # only where the loop asks: ranks that collect garbage at random wait for each other
    with profiled(run.config, run.process.rank, run.state.step) as after_step:
        if run.state.step == 0:
            _validate(run)
        _advance_curriculum(run)  # also where a run that had come to its end is made longer
        run.interval = Interval()
        while run.state.step < run.total_steps and not run.stopping:
            _step(run, bool(stop))
            after_step(run.state.step)
    gc.enable()
    # The last validation, unless it was made by the run that got here, by us now, or just before.
    if (
        run.state.step >= max(run.total_steps, run.first_step)
        and run.state.step % run.config.validation.freq > 0
    ):
        _validate(run)
    ended = run.state.step >= run.total_steps
    _save(run, wait=True, weights_only=ended and run.config.checkpoint.model_weights_only)
    run.saver.wait()
    if run.state.best_step is not None:
        logger.info(
            "best validation loss: %.4f, after step %s", run.state.best_loss, run.state.best_step
        )
    return ended


def _step(run: Run, stop: bool) -> None:
    """Trains one step, then does what falls due after it; `stop` makes it the last one, on all ranks."""
    config, state, saving = run.config, run.state, run.config.checkpoint
    objective = run.objective
    batches = objective.annotate(run.built, _next_batches(run), objective.loss)
    overdue = (
        time.monotonic() - run.saver.last_time >= saving.interval
        and saving.interval_type == "seconds"
    )
    overdue = overdue and run.process.rank == 0  # clocks differ: the first's counts
    totals = total_counts(run.built, batches, stop=stop, save=overdue)
    divisor = totals[objective.denominator]
    rate = learning_rate(config, state.step, run.total_steps)
    for group in run.optimizer.param_groups:  # before the backward pass, which may be what updates
        group["lr"] = rate
    # By step, so that a resumed run draws the same; ranks differ, so that dropout does.
    _seed_draws(random_key(config.training.seed, 1, state.step, run.process.rank) % 2**32)
    sums = accumulate_gradients(run.built, batches, objective.loss, divisor)
    norm, skip = update(run.built, run.optimizer, divisor)
    state.step += 1
    _send_to_host(run, totals | {"finite": torch.isfinite(norm).double(), "skipped": skip.double()})
    run.metrics.advance(completed=state.step)
    if state.step % config.metrics.log_freq == 0 or state.step in (1, run.total_steps):
        _log(run, sums, totals, norm, rate)
    if state.step == run.first_step:
        tighten_timeout(config, run.process)
    if state.step % config.training.gc_freq == 0:
        gc.collect(1)
    started = time.perf_counter()
    if state.step % config.validation.freq == 0:
        _validate(run)
    if not run.stopping:
        _advance_curriculum(run)
    by_steps = saving.interval_type == "steps" and state.step % saving.interval == 0
    best = saving.keep_best and state.best_step == state.step
    run.save_wanted |= by_steps or best
    if run.save_wanted and not run.stopping and state.step < run.total_steps:
        _act_on_numbers(run)
        if (
            best or not run.skipped_in_a_row
        ):  # else after the next step that is made, if these weights can make one
            _save(run)
            if run.after_checkpoint is not None:
                run.after_checkpoint()
    run.interval.started += time.perf_counter() - started


def _seed_draws(seed: int) -> None:
    """Seeds whatever a model may draw from; by ourselves, as importing transformers' way imports peft."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _next_batches(run: Run) -> list[Batch]:
    """The step's batches; what they take, and this rank's share of the work in them, count for the interval."""
    started, built = time.perf_counter(), run.built
    batches = run.objective.next_step(built, run.loader)
    run.interval.waited += time.perf_counter() - started
    for batch in batches:
        run.interval.flops += (
            built.flops(batch.counts["tokens"], batch.cu_seqlens.diff()) / built.mesh.layout.sharing
        )
    return batches


def _send_to_host(run: Run, numbers: dict[str, Tensor]) -> None:
    """Sends a step's numbers to the host, which reads them a step late, so that it never waits for a GPU."""
    _act_on_numbers(run)
    stacked = torch.stack([*numbers.values()])
    sent = torch.get_device_module(stacked.device).Event()
    run.pending = [*numbers], stacked.to("cpu", non_blocking=True), sent  # into page-locked memory
    sent.record()
    if not stacked.is_cuda:
        _act_on_numbers(run)


def _act_on_numbers(run: Run) -> None:
    """Acts on the numbers that were sent to the host, if any; every rank gets the same, at the same step."""
    if run.pending is None:
        return
    state, training = run.state, run.config.training
    names, stacked, sent = run.pending
    run.pending = None
    sent.synchronize()
    numbers = dict(zip(names, stacked.tolist(), strict=True))
    state.tokens += int(numbers["tokens"])
    for source in range(len(state.source_tokens)):
        state.source_tokens[source] += int(numbers[f"source_{source}"])
    state.skipped_steps += int(numbers["skipped"])
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if numbers["skipped"] else 0
    run.interval.tokens += numbers["tokens"]
    run.stopping |= numbers["stop"] > 0
    run.save_wanted |= numbers["save"] > 0
    if not numbers["finite"] and not training.skip_nan_inf:
        raise RunError(
            f"the gradient norm is not finite (by step {state.step}); the last checkpoint is from before that. "
            f"training.skip_nan_inf = true would leave such steps out; a lower optimizer.lr or a longer "
            f"lr_scheduler.warmup_steps often cures it."
        )
    if run.skipped_in_a_row >= training.max_skipped_steps:
        raise RunError(
            f"{run.skipped_in_a_row} steps in a row were skipped because their gradients are not finite "
            f"(training.max_skipped_steps): the run has diverged."
        )


def _log(run: Run, own_sums: Tensor, totals: dict[str, Tensor], norm: Tensor, rate: float) -> None:
    state, interval = run.state, run.interval
    summed = torch.cat([own_sums, own_sums.new_tensor([interval.waited])])
    dist.all_reduce(summed)
    _act_on_numbers(run)
    names = run.objective.loss.names
    *over_ranks, waited = torch.cat(
        [torch.stack([*totals.values()]), summed]
    ).tolist()  # one wait for a GPU
    counts = dict(zip(totals, over_ranks, strict=False))
    sums = dict(zip(names, over_ranks[len(totals) :], strict=True))
    seconds = time.perf_counter() - interval.started
    row = {
        "step": state.step,
        **run.objective.report(sums, counts),
        "grad_norm": None if run.config.optimizer.early_step_in_backward else norm.item(),
        "lr": rate,
        "tokens": state.tokens,
        "tokens_per_second": interval.tokens / seconds,
        "mfu": interval.flops / seconds / run.peak_flops if run.peak_flops else None,
        "memory_gib": peak_memory(run.process.device),
        "data_wait_fraction": waited / run.process.world_size / seconds,
        "skipped_steps": state.skipped_steps,
    }
    sources, seen = run.config.data.resolved_sources(), state.source_tokens
    if len(sources) > 1:
        row |= {
            f"share_{index}_{source.dataset}": seen[index] / sum(seen)
            for index, source in enumerate(sources)
        }
    run.metrics.write(row)
    run.interval = Interval()


def _validate(run: Run) -> None:
    """Measures the held-out loss, samples text, and ends the run early if asked."""
    state, settings = run.state, run.config.validation
    if run.validation is not None:
        sums, counts = evaluate(run.built, run.validation(), run.objective)
        measured = run.objective.report_held_out(sums, counts)
        run.metrics.write({"step": state.step} | measured)
        state.worse_validations += 1
        if measured["val_loss"] < state.best_loss:
            state.best_loss, state.best_step, state.worse_validations = (
                measured["val_loss"],
                state.step,
                0,
            )
        if settings.patience is not None and state.worse_validations >= settings.patience:
            logger.info(
                "stopping early: no better validation loss for %d validations", settings.patience
            )
            run.total_steps = state.step
        _advance_curriculum(run, measured["val_loss"])
    if settings.prompts:
        _sample(run)


def _sample(run: Run) -> None:
    """Writes what the model makes of the prompts."""
    from lacuna.rollout.generate import generate_text

    config = run.config
    settings = config.validation
    as_chat = config.conversations is not None
    sampling = (settings.max_new_tokens, settings.temperature, config.training.seed, as_chat)
    for prompt in settings.prompts:
        text = generate_text(run.built.model, run.tokenizer, prompt, *sampling)
        run.metrics.write_sample(run.state.step, prompt, text)


def _advance_curriculum(run: Run, loss: float = np.inf) -> None:
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
    ranking = (
        settings.rank_every is not None
        and state.step % settings.rank_every == 0
        and state.ranked != state.step
    )
    if ranking:
        _rank(run)
    if ranking or state.stage > stage:
        run.open_data()


def _rank(run: Run) -> None:
    """Measures the loss of the documents that this pass has left, and writes it to the run folder.

    Beside it goes how often each document was used, which comes first in the order; those of which
    no pass begins any (empty ones, or too long) are last.
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
    losses[left] = document_losses(run.built, plan, left, run.objective)
    state.ranked = state.step
    path = ranking_file(run.config, state.step)

    def write() -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        np.savez(f"{path}.new.npz", uses=uses, losses=losses)
        sync(f"{path}.new.npz")
        os.replace(f"{path}.new.npz", path)
        sync(os.path.dirname(path))

    on_first(run.process, write)
    logger.info(
        "step %d: %d documents ranked, loss %.3f on average",
        state.step,
        len(left),
        np.nanmean(losses[left]),
    )


def _save(run: Run, wait: bool = False, weights_only: bool = False) -> None:
    """Writes a checkpoint of the present step, unless there is one."""
    state, settings = run.state, run.config.checkpoint
    _act_on_numbers(run)
    run.save_wanted = False
    if run.saved_step == state.step or not settings.enable_checkpoint:
        return
    tensors = model_tensors(
        run.built.model, getattr(torch, settings.export_dtype) if weights_only else None
    )
    saved = {
        "step": state.step,
        "counters": vars(state).copy(),
        "global_batch": run.stages[0][1].global_batch,
    }
    saved["skipped_in_a_row"] = run.skipped_in_a_row
    if not weights_only:
        tensors |= optimizer_tensors(run.built.model, run.optimizer)
        saved["objective"] = run.objective.state_dict()
        saved["data"] = merge_states(gather_objects(run.process, run.loader.state_dict()))
        saved["started_with"] = run.started_with | {"rate": run.optimizer.param_groups[0]["lr"]}
    run.saver.save(state.step, tensors, saved, wait)
    run.saved_step = state.step
