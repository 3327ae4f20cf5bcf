"""The one loop: step, log, validate, save."""

import gc
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lacuna.config.errors import RunError
from lacuna.data import Batch
from lacuna.model.architecture import step_flops
from lacuna.parallel.processes import gather_objects, tighten_timeout
from lacuna.train.control import Readback, StopRequest, no_random_collection
from lacuna.train.optimizer import optimizer_tensors
from lacuna.train.profiling import profiled
from lacuna.train.resume import model_tensors, random_states, sample_settings
from lacuna.train.schedule import learning_rate
from lacuna.train.setup import Run
from lacuna.train.step import Status, accumulate_gradients, agree, count_skip, update
from lacuna.train.validation import evaluate, write_samples

logger = logging.getLogger(__name__)


@dataclass
class Interval:
    """What is measured from one log to the next."""

    started: float = field(default_factory=time.perf_counter)
    excluded: float = 0.0
    waited: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


def train(run: Run, stop: StopRequest) -> bool:
    """Trains to the end or until asked to stop. Returns whether it came to the end.

    Raises `RunError` when the loss stops being finite, too many steps in a row are skipped, or a disk is full.
    """
    loop = _Loop(run, stop)
    with no_random_collection(), profiled(run.config, run.process.rank, run.state.step) as after_step:
        if run.state.step == 0:
            loop.validate()
        while run.state.step < run.total_steps and not loop.stopping:
            loop.step()
            after_step(run.state.step)
    loop.finish()
    return run.state.step >= run.total_steps or loop.out_of_patience


class _Loop:
    """The moving parts of one call of `train`."""

    def __init__(self, run: Run, stop: StopRequest) -> None:
        self.run = run
        self.stop = stop
        self.batches: Iterator[Batch] = iter(run.loader)
        self.readback = Readback(run.process.device)
        self.skipped = torch.tensor([run.state.skipped_steps, 0.0], dtype=torch.float64, device=run.process.device)
        self.interval = Interval()
        self.stopping = self.out_of_patience = self.save_wanted = False
        self.first_step = True
        self.saved_step = run.state.step

    def step(self) -> None:
        """Trains one step, then does what falls due after it."""
        run, config, state = self.run, self.run.config, self.run.state
        device = run.process.device
        batches = self._next_batches()
        save = run.process.is_first and run.saver.due_by_time()  # clocks differ: the first rank's counts
        totals = agree(batches, self.stop.requested, save, device)
        loss = accumulate_gradients(run.built, batches, totals[1], device)
        rate = learning_rate(config, state.step, run.total_steps)
        norm, skip = update(config, run.built, run.optimizer, totals[1], rate)
        self.skipped = count_skip(self.skipped, skip)
        state.step += 1
        news = torch.stack([*totals[:4], torch.isfinite(norm).double(), *self.skipped, *totals[4:]])
        self._take(self.readback.exchange(news))
        self._count(batches)
        run.metrics.advance(state.step)
        if state.step % config.metrics.log_freq == 0 or state.step in (1, run.total_steps):
            self._log(loss, totals[1], norm, rate)
        if self.first_step:
            tighten_timeout(config, run.mesh)
            self.first_step = False
        if state.step % config.training.gc_freq == 0:
            gc.collect(1)
        if state.step % config.validation.freq == 0:
            self.validate()
        due = self.save_wanted or run.saver.due_by_steps(state.step)
        if due and not self.stopping and state.step < run.total_steps:
            self.save()

    def _next_batches(self) -> list[Batch]:
        started = time.perf_counter()
        batches = [next(self.batches) for _ in range(self.run.plan.accumulation)]
        self.interval.waited += time.perf_counter() - started
        return batches

    def _count(self, batches: list[Batch]) -> None:
        """Adds this rank's share of the work to the interval."""
        for batch in batches:
            lengths = batch.cu_seqlens.diff()
            self.interval.flops += step_flops(
                self.run.built.matrix_parameters, self.run.built.attention_shapes, batch.tokens, lengths
            )

    def _take(self, arrived: list[list[float]]) -> None:
        """Acts on news that reached the host; every rank gets the same, at the same step."""
        for values in arrived:
            status, sources = Status(*values[:7]), values[7:]
            self._judge(status)
            self.run.state.tokens += int(status.tokens)
            self.run.state.count_sources(sources)
            self.run.state.skipped_steps = int(status.skipped)
            self.interval.tokens += status.tokens
            self.stopping = self.stopping or status.stop > 0
            self.save_wanted = self.save_wanted or status.save > 0

    def _judge(self, status: Status) -> None:
        training = self.run.config.training
        if not status.finite and not training.skip_nan_inf:
            raise RunError(
                f"the gradient norm is not finite (by step {self.run.state.step}); the last checkpoint is from before "
                f"that. training.skip_nan_inf = true would leave such steps out; a lower optimizer.lr or a longer "
                f"lr_scheduler.warmup_steps often cures it."
            )
        if status.skipped_in_a_row >= training.max_skipped_steps:
            raise RunError(
                f"{int(status.skipped_in_a_row)} steps in a row were skipped because their gradients are not finite "
                f"(training.max_skipped_steps): the run has diverged."
            )

    def _log(self, loss: torch.Tensor, trained: torch.Tensor, norm: torch.Tensor, rate: float) -> None:
        run, interval = self.run, self.interval
        summed = torch.stack([loss, torch.tensor(interval.waited, dtype=torch.float64, device=loss.device)])
        dist.all_reduce(summed)
        self._take(self.readback.flush())
        total_loss, waited = summed.tolist()
        seconds = time.perf_counter() - interval.started - interval.excluded
        rate_of_flops = interval.flops / seconds
        run.metrics.write(
            {
                "step": run.state.step,
                "loss": total_loss / max(trained.item(), 1),
                "grad_norm": norm.item(),
                "lr": rate,
                "tokens": run.state.tokens,
                "tokens_per_second": interval.tokens / seconds,
                "mfu": rate_of_flops / run.peak_flops if run.peak_flops else None,
                "memory_gib": run.peak_memory(),
                "data_wait_fraction": waited / run.process.world_size / seconds,
                "skipped_steps": run.state.skipped_steps,
                **run.source_shares(),
            }
        )
        self.interval = Interval()

    def validate(self) -> None:
        """Measures the held-out loss, samples text, and keeps the best checkpoint if asked."""
        run, state, settings = self.run, self.run.state, self.run.config.validation
        started = time.perf_counter()
        if run.validation is not None:
            loss, bits_per_byte = evaluate(run.built, run.validation, run.process)
            run.metrics.write({"step": state.step, "val_loss": loss, "val_bits_per_byte": bits_per_byte})
            better = loss < state.best_loss
            state.worse_validations = 0 if better else state.worse_validations + 1
            if better:
                state.best_loss, state.best_step = loss, state.step
            if better and run.config.checkpoint.keep_best and state.step > 0:
                run.saver.best_step = state.step
                self.save()
            if settings.patience is not None and state.worse_validations >= settings.patience:
                logger.info("stopping early: no better validation loss for %d validations", settings.patience)
                self.stopping = self.out_of_patience = True
        for prompt, text in write_samples(run.built, run.tokenizer, run.config, run.process, state.step):
            run.metrics.show_sample(state.step, prompt, text)
        self.interval.excluded += time.perf_counter() - started

    def save(self, wait: bool = False, tensors: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint of the present step, unless there is one."""
        run, state = self.run, self.run.state
        self.save_wanted = False
        if self.saved_step == state.step or not run.config.checkpoint.enable_checkpoint:
            return
        started = time.perf_counter()
        self._take(self.readback.flush())
        per_rank = gather_objects(run.process, {"data": run.loader.state_dict(), "random": random_states()})
        saved = {
            "step": state.step,
            "counters": vars(state).copy(),
            "global_batch": run.plan.global_batch,
            "settings": sample_settings(run.config),
            "ranks": per_rank,
        }
        if tensors is None:
            tensors = model_tensors(run.built.model) | optimizer_tensors(run.built.model, run.optimizer)
        run.saver.save(state.step, tensors, saved, wait)
        self.saved_step = state.step
        self.interval.excluded += time.perf_counter() - started

    def finish(self) -> None:
        """The last validation and the last checkpoint."""
        run, state = self.run, self.run.state
        self._take(self.readback.flush())
        ended = state.step >= run.total_steps or self.out_of_patience
        measured = self.first_step or state.step % run.config.validation.freq == 0  # by the run that got here, or us
        if ended and not measured:
            self.validate()
        weights = None
        if ended and run.config.checkpoint.model_weights_only:
            dtype = getattr(torch, run.config.checkpoint.export_dtype)
            whole = model_tensors(run.built.model).items()
            weights = {name: value.to(dtype if value.is_floating_point() else value.dtype) for name, value in whole}
        self.save(wait=True, tensors=weights)
        run.saver.wait()
        if math.isfinite(state.best_loss):
            logger.info("best validation loss: %.4f, after step %s", state.best_loss, state.best_step)
