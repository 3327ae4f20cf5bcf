"""The one loop: step, log, validate, save."""

import gc
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import set_seed

from lacuna.config.errors import RunError
from lacuna.data import Batch, merge_states
from lacuna.data.mixture import random_key
from lacuna.model.architecture import attention_widths, step_flops
from lacuna.parallel.processes import gather_objects, tighten_timeout
from lacuna.rollout.generate import generate_text
from lacuna.train.checkpoint import model_tensors
from lacuna.train.metrics import peak_flops, peak_memory
from lacuna.train.optimizer import optimizer_tensors, set_learning_rate
from lacuna.train.profiling import profiled
from lacuna.train.schedule import learning_rate
from lacuna.train.setup import Run
from lacuna.train.step import accumulate_gradients, agree, update
from lacuna.train.validation import evaluate

logger = logging.getLogger(__name__)


@dataclass
class Interval:
    """What is measured from one log to the next; `started` is put off by the time that is not training."""

    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


def train(run: Run, stop: Sequence[int]) -> bool:
    """Trains to the end or until a signal is in `stop`. Returns whether it came to the end.

    Raises `RunError` when the loss stops being finite, too many steps in a row are skipped, or a disk is full.
    """
    loop = _Loop(run, stop)
    gc.collect()
    gc.disable()  # only where the loop asks: ranks that collect garbage at random wait for each other
    try:
        with profiled(run.config, run.process.rank, run.state.step) as after_step:
            if run.state.step == 0:
                loop.validate()
                loop.interval = Interval()
            while run.state.step < run.total_steps and not loop.stopping:
                loop.step()
                after_step(run.state.step)
        return loop.finish()
    finally:
        gc.enable()


class _Loop:
    """The moving parts of one call of `train`."""

    def __init__(self, run: Run, stop: Sequence[int]) -> None:
        self.run, self.state, self.stop = run, run.state, stop
        self.peak_flops = peak_flops(run.process.device)
        self.attention_widths = attention_widths(run.built.model.config)
        self.pending: tuple[Tensor, torch.cuda.Event] | None = None
        self.interval = Interval()
        self.stopping = self.out_of_patience = self.save_wanted = False
        self.skipped_in_a_row = 0
        self.first_step, self.saved_step = run.state.step + 1, run.state.step

    def step(self) -> None:
        """Trains one step, then does what falls due after it."""
        run, config, state = self.run, self.run.config, self.state
        batches = self._next_batches()
        save = run.process.is_first and run.saver.due_by_time()  # clocks differ: the first rank's counts
        totals = agree(batches, bool(self.stop), save, run.built)
        rate = learning_rate(config, state.step, run.total_steps)
        set_learning_rate(run.optimizer, rate)
        # By step, so that a resumed run draws the same; ranks differ, so that dropout does.
        set_seed(random_key(config.training.seed, 1, state.step, run.process.rank) % 2**32)
        loss = accumulate_gradients(run.built, batches, totals[1])
        norm, skip = update(run.built, run.optimizer, totals[1])
        state.step += 1
        self._tell(torch.stack([*totals, torch.isfinite(norm).double(), skip.double()]))
        run.metrics.advance(completed=state.step)
        if state.step % config.metrics.log_freq == 0 or state.step in (1, run.total_steps):
            self._log(loss, totals[1], norm, rate)
        if state.step == self.first_step:
            tighten_timeout(config, run.process)
        if state.step % config.training.gc_freq == 0:
            gc.collect(1)
        started = time.perf_counter()
        if state.step % config.validation.freq == 0:
            self.validate()
        due = self.save_wanted or run.saver.due_by_steps(state.step)
        if due and not self.stopping and state.step < run.total_steps:
            self.save()
        self.interval.started += time.perf_counter() - started

    def _next_batches(self) -> list[Batch]:
        """The step's batches; what they take, and this rank's share of the work in them, count for the interval."""
        started, built = time.perf_counter(), self.run.built
        batches = [next(self.run.loader) for _ in range(self.run.plan.accumulation)]
        self.interval.waited += time.perf_counter() - started
        for batch in batches:
            lengths = batch.cu_seqlens.diff()
            flops = step_flops(built.matrix_parameters, self.attention_widths, batch.tokens, lengths)
            self.interval.flops += flops / built.mesh.layout.sharing
        return batches

    def _tell(self, news: Tensor) -> None:
        """Sends a step's numbers to the host, which reads them a step late, so that it never waits for a GPU."""
        if not news.is_cuda:
            return self._take(news.tolist())
        self._catch_up()
        host = news.to("cpu", non_blocking=True)  # into page-locked memory
        self.pending = host, torch.cuda.current_stream().record_event()

    def _catch_up(self) -> None:
        """Waits for the numbers that were sent to the host, if any."""
        if self.pending is not None:
            (host, sent), self.pending = self.pending, None
            sent.synchronize()
            self._take(host.tolist())

    def _take(self, news: list[float]) -> None:
        """Acts on a step's numbers; every rank gets the same, at the same step."""
        state, training = self.state, self.run.config.training
        tokens, _, stop, save, *sources, finite, skipped = news
        state.tokens += int(tokens)
        state.source_tokens = [seen + int(more) for seen, more in zip(state.source_tokens, sources, strict=True)]
        state.skipped_steps += int(skipped)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.interval.tokens += tokens
        self.stopping |= stop > 0
        self.save_wanted |= save > 0
        if not finite and not training.skip_nan_inf:
            raise RunError(
                f"the gradient norm is not finite (by step {state.step}); the last checkpoint is from before "
                f"that. training.skip_nan_inf = true would leave such steps out; a lower optimizer.lr or a longer "
                f"lr_scheduler.warmup_steps often cures it."
            )
        if self.skipped_in_a_row >= training.max_skipped_steps:
            raise RunError(
                f"{self.skipped_in_a_row} steps in a row were skipped because their gradients are not finite "
                f"(training.max_skipped_steps): the run has diverged."
            )

    def _log(self, loss: Tensor, trained: Tensor, norm: Tensor, rate: float) -> None:
        run, state, interval = self.run, self.state, self.interval
        summed = torch.stack([loss, torch.tensor(interval.waited, dtype=torch.float64, device=loss.device)])
        dist.all_reduce(summed)
        self._catch_up()
        total_loss, waited = summed.tolist()
        seconds = time.perf_counter() - interval.started
        row = {
            "step": state.step,
            "loss": total_loss / max(trained.item(), 1),
            "grad_norm": None if run.config.optimizer.early_step_in_backward else norm.item(),
            "lr": rate,
            "tokens": state.tokens,
            "tokens_per_second": interval.tokens / seconds,
            "mfu": interval.flops / seconds / self.peak_flops if self.peak_flops else None,
            "memory_gib": peak_memory(run.process.device),
            "data_wait_fraction": waited / run.process.world_size / seconds,
            "skipped_steps": state.skipped_steps,
        }
        run.metrics.write(row | state.source_shares(run.config))
        self.interval = Interval()

    def validate(self) -> None:
        """Measures the held-out loss, samples text, and keeps the best checkpoint if asked."""
        run, state, config, settings = self.run, self.state, self.run.config, self.run.config.validation
        if run.validation is not None:
            measured = evaluate(run.built, run.validation)
            run.metrics.write({"step": state.step} | measured)
            loss = measured["val_loss"]
            if loss < state.best_loss:
                state.best_loss, state.best_step, state.worse_validations = loss, state.step, 0
                if config.checkpoint.keep_best and state.step > 0:
                    self.save()
            else:
                state.worse_validations += 1
            if settings.patience is not None and state.worse_validations >= settings.patience:
                logger.info("stopping early: no better validation loss for %d validations", settings.patience)
                self.stopping = self.out_of_patience = True
        chat, seed = config.job.task == "sft", config.training.seed
        for prompt in settings.prompts:
            text = generate_text(
                run.built.model, run.tokenizer, prompt, settings.max_new_tokens, settings.temperature, seed, chat
            )
            run.metrics.write_sample(state.step, prompt, text)

    def save(self, wait: bool = False, weights_only: bool = False) -> None:
        """Writes a checkpoint of the present step, unless there is one."""
        run, state, settings = self.run, self.state, self.run.config.checkpoint
        self._catch_up()
        self.save_wanted = False
        if self.saved_step == state.step or not settings.enable_checkpoint:
            return
        tensors = model_tensors(run.built.model)
        saved = {"step": state.step, "counters": vars(state).copy(), "global_batch": run.plan.global_batch}
        if weights_only:
            dtype = getattr(torch, settings.export_dtype)
            tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
        else:
            tensors |= optimizer_tensors(run.built.model, run.optimizer)
            saved["data"] = merge_states(gather_objects(run.process, run.loader.state_dict()))
        run.saver.save(state.step, tensors, saved, wait)
        self.saved_step = state.step

    def finish(self) -> bool:
        """The last validation and the last checkpoint. Returns whether the run came to its end."""
        run, state = self.run, self.state
        self._catch_up()
        ended = state.step >= run.total_steps or self.out_of_patience
        # It was measured by the run that got here, by us now, or just before.
        if ended and state.step >= self.first_step and state.step % run.config.validation.freq > 0:
            self.validate()
        self.save(wait=True, weights_only=ended and run.config.checkpoint.model_weights_only)
        run.saver.wait()
        if math.isfinite(state.best_loss):
            logger.info("best validation loss: %.4f, after step %s", state.best_loss, state.best_step)
        return ended
