"""The one loop: step, log, validate, advance the curriculum, save."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config import OutageError, logger
from lacuna.config.documents import CurriculumConfig
from lacuna.config.learning_rate import learning_rate
from lacuna.data import Batch
from lacuna.data.mixture import random_key
from lacuna.formats.checkpoint import model_tensors
from lacuna.parallel.processes import tighten_timeout
from lacuna.train.metrics import peak_memory
from lacuna.train.numbers import act_on_numbers, send_to_host
from lacuna.train.optimizer import optimizer_tensors, update
from lacuna.train.setup import Run
from lacuna.train.state import Interval
from lacuna.train.step import (
    accumulate_gradients,
    measure_held_out,
    require_counted,
    seed_draws,
    total_counts,
)


def train(run: Run, stop: list[int]) -> bool:
    """Trains to the end or until a signal is in `stop`. Returns whether it came to the end.

    Raises `RunError` when the loss stops being finite, too many steps in a row are skipped, or a
    disk is full; and `OutageError`, once it has saved, where what a step needs is gone or wrong.
    """
    gc.collect()
    # Collected only where the loop asks, on all ranks at once: otherwise they wait for each other.
    gc.disable()
    with _profile_if_asked(run) as after_step:
        # Also where the run stopped before the validation that was due after its last step.
        if (
            run.state.validated < run.state.step
            and run.state.step % run.config.validation.freq == 0
        ):
            _validate(run)
        _advance_curriculum(run)  # also when a run that had ended is made longer
        run.start.end_phase("preparation")
        run.interval = Interval()
        with _saved_on_outage(run):
            while run.state.step < run.total_steps and not run.stopping:
                train_step(run, bool(stop))
                after_step(run.state.step)
            ended = run.state.step >= run.total_steps
            if ended and run.state.validated < run.state.step:
                _validate(run)
    gc.enable()
    _save(run, wait=True, weights_only=ended and run.config.checkpoint.model_weights_only)
    run.saver.wait()
    if run.state.best_step is not None:
        loss = run.state.best_loss
        is_by_reward = hasattr(run.objective, "measure_held_out")
        told = f"reward: {-loss:.4f}" if is_by_reward else f"loss: {loss:.4f}"
        logger.info("best validation %s, after step %s", told, run.state.best_step)
    return ended


@contextmanager
def _saved_on_outage(run: Run) -> Iterator[None]:
    """Within it a checkpoint is written where what a step needs is gone or wrong."""
    try:
        yield
    except OutageError:
        _save(run, wait=True)
        raise


def _profile_if_asked(run: Run) -> AbstractContextManager[Callable[[int], None]]:
    """A context that records the loop where the settings ask for it.

    It gives a function to call after each step.
    """
    settings = run.config.profiling
    if not (settings.enable_profiling or settings.enable_memory_snapshot):
        return nullcontext(lambda step: None)
    from lacuna.train.profiling import profiled  # an extension

    return profiled(settings, run.config.job.dump_folder, run.process.rank, run.state.step)


def train_step(run: Run, stop: bool) -> None:
    """Trains one step, then does what is due after it.

    With `stop` on any rank it is the last step on all.
    """
    config = run.config
    state = run.state
    objective = run.objective
    batches = objective.annotate(run.built, _next_batches(run), objective.loss)
    totals = total_counts(run.built, batches, stop=stop, save=_save_is_overdue(run))
    require_counted(objective, batches[0], config.job.task)
    divisor = totals[objective.denominator]
    rate = learning_rate(config.optimizer.lr, config.lr_scheduler, state.step, run.total_steps)
    for group in run.optimizer.param_groups:  # before the backward pass, which may update weights
        group["lr"] = rate * group.get("lr_ratio", 1.0)
    # By step, so that a resumed run draws the same; ranks differ, so that dropout does.
    seed_draws(random_key(config.training.seed, 1, state.step, run.process.rank) % 2**32)
    with run.halves.accumulate(len(batches)):
        sums = accumulate_gradients(run.built, batches, objective.loss, divisor, run.recorded)
    norm, skip = update(run.built, run.optimizer, divisor, run.recorded)
    if run.router_load is not None:
        run.router_load.after_step(skip)
    if run.second is not None:
        sums, norm, skip = run.second.train(batches, divisor, rate, (sums, norm, skip))
    state.step += 1
    send_to_host(run, totals | {"finite": torch.isfinite(norm).double(), "skipped": skip.double()})
    run.metrics.advance(completed=state.step)
    if state.step % config.metrics.log_freq == 0 or state.step in (1, run.total_steps):
        _log(run, sums, totals, norm, rate)
    if state.step == run.first_step:
        act_on_numbers(run)  # waits for a GPU to be done with the step
        run.start.end_phase("first step")
        logger.info("step %d was done %s", state.step, run.start)
        tighten_timeout(config.comm.train_timeout_seconds, run.process)
    if state.step % config.training.gc_freq == 0:
        gc.collect(1)
    started = time.perf_counter()
    if state.step % config.validation.freq == 0:
        _validate(run)
    if run.looks is not None and state.step % config.metrics.attention == 0:
        run.metrics.write({"step": state.step} | run.looks.report())
    if not run.stopping:
        _advance_curriculum(run)
    _save_if_due(run)
    run.interval.started += time.perf_counter() - started


def _save_is_overdue(run: Run) -> bool:
    """Whether it is time for a checkpoint, by the first rank's clock alone: clocks differ."""
    settings = run.config.checkpoint
    if settings.interval_type != "seconds" or run.process.rank > 0:
        return False
    return time.monotonic() - run.saver.last_time >= settings.interval


def _save_if_due(run: Run) -> None:
    """Writes a checkpoint after a step where one is due, unless the run ends and writes one."""
    state = run.state
    settings = run.config.checkpoint
    by_steps = settings.interval_type == "steps" and state.step % settings.interval == 0
    is_best = settings.keep_best and state.best_step == state.step
    run.save_wanted |= by_steps or is_best
    if not run.save_wanted or run.stopping or state.step >= run.total_steps:
        return
    act_on_numbers(run)
    if run.skipped_in_a_row and not is_best:
        return  # it is saved after the next step that is not skipped
    _save(run)
    if run.after_checkpoint is not None:
        run.after_checkpoint()


def _next_batches(run: Run) -> Sequence[Batch]:
    """The batches of the step.

    The time that this rank waits for them, and its share of their work, are added to the interval.
    """
    started = time.perf_counter()
    built = run.built
    if run.loader.plan.table is None:  # tokenised while training, when ranks meet what is wrong
        from lacuna.rollout.failures import read_alike  # an extension

        batches = read_alike(run.objective.next_step, built, run.loader, run.config.comm)
    else:
        batches = run.objective.next_step(built, run.loader)
    run.interval.waited += time.perf_counter() - started
    for batch in batches:
        work = built.flops(int(batch.counts["tokens"]), batch.cu_seqlens.diff())
        run.interval.flops += work / built.mesh.layout.sharing
    return batches


def _log(run: Run, own_sums: Tensor, totals: dict[str, Tensor], norm: Tensor, rate: float) -> None:
    """Writes a row of metrics, for the steps since the one before, and begins a new interval."""
    state = run.state
    interval = run.interval
    summed = torch.cat([own_sums, own_sums.new_tensor([interval.waited])])
    dist.all_reduce(summed)
    act_on_numbers(run)
    names = run.objective.loss.names + (() if run.second is None else run.second.names)
    # One wait for a GPU.
    numbers = torch.cat([torch.stack([*totals.values()]), summed, norm[None].to(summed)])
    *over_ranks, waited, grad_norm = numbers.tolist()
    counts = dict(zip(totals, over_ranks, strict=False))
    sums = dict(zip(names, over_ranks[len(totals) :], strict=True))
    seconds = time.perf_counter() - interval.started
    row = {
        "step": state.step,
        **run.objective.report(sums, counts),
        "grad_norm": None if run.config.optimizer.early_step_in_backward else grad_norm,
        "lr": rate,
        "tokens": state.tokens,
        "tokens_per_second": interval.tokens / seconds,
        "mfu": interval.flops / seconds / run.peak_flops if run.peak_flops else None,
        "memory_gib": peak_memory(run.process.device),
        "data_wait_fraction": waited / run.process.world_size / seconds,
        "skipped_steps": state.skipped_steps,
    }
    if run.router_load is not None and run.config.metrics.router:
        row |= run.router_load.report()
    sources = run.config.data.resolved_sources()
    if len(sources) > 1:
        seen = sum(state.source_tokens)
        for index, source in enumerate(sources):
            row[f"share_{index}_{source.dataset}"] = state.source_tokens[index] / seen
    run.metrics.write(row)
    run.interval = Interval()


def _validate(run: Run) -> None:
    """Measures the held-out loss, samples text, and ends the run early if that is asked for."""
    state = run.state
    settings = run.config.validation
    if run.validation is not None:
        measured, loss = measure_held_out(run.built, run.objective, run.validation)
        run.metrics.write({"step": state.step} | measured)
        state.worse_validations += 1
        if loss < state.best_loss:
            state.best_loss = loss
            state.best_step = state.step
            state.worse_validations = 0
        if settings.patience is not None and state.worse_validations >= settings.patience:
            said = "stopping early: nothing better in %d validations"
            logger.info(said, settings.patience)
            run.total_steps = state.step
        _advance_curriculum(run, loss)
    if settings.prompts:
        _sample_text(run)
    state.validated = state.step


def _sample_text(run: Run) -> None:
    """Lets the model continue the prompts, and writes what it says."""
    from lacuna.rollout.generate import generate_text

    config = run.config
    settings = config.validation
    as_chat = config.conversations is not None and bool(run.tokenizer.chat_template)
    sampling = (settings.max_new_tokens, settings.temperature, config.training.seed, as_chat)
    is_divided = run.built.mesh.layout.tp > 1
    for prompt in settings.prompts:
        text = generate_text(run.built.model, run.tokenizer, prompt, *sampling, whole=is_divided)
        run.metrics.write_sample(run.state.step, prompt, text)


def _advance_curriculum(run: Run, loss: float = np.inf) -> None:
    """Advances the curriculum by the steps done and the validation `loss`.

    Does nothing without a curriculum, or when no step is left.
    """
    if run.config.curriculum == CurriculumConfig() or run.state.step >= run.total_steps:
        return
    from lacuna.train.curriculum import advance_curriculum  # an extension

    advance_curriculum(run, loss)


def _save(run: Run, wait: bool = False, weights_only: bool = False) -> None:
    """Writes a checkpoint of the present step, unless there is one."""
    state = run.state
    settings = run.config.checkpoint
    act_on_numbers(run)
    run.save_wanted = False
    if run.saved_step == state.step or not settings.enable_checkpoint:
        return
    model = run.built.model
    with run.halves.joined():
        if weights_only:
            tensors = model_tensors(model, getattr(torch, settings.export_dtype))
            saved = {"loop": run.loop_state()}
        else:
            tensors = model_tensors(model) | optimizer_tensors(model, run.optimizer)
            saved = run.state_dict()
            if run.second is not None:
                tensors |= run.second.tensors()
        run.saver.save(state.step, tensors, saved, wait)
    run.saved_step = state.step
