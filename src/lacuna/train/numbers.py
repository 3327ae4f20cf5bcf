"""A step's numbers: sent to the host without waiting, and acted on once they are there."""

import torch
from torch import Tensor

from lacuna.config import RunError
from lacuna.train.setup import Run


def send_to_host(run: Run, numbers: dict[str, Tensor]) -> None:
    """Sends a step's numbers to the host, which reads them a step later, so as not to wait."""
    act_on_numbers(run)
    stacked = torch.stack([*numbers.values()])
    sent = torch.get_device_module(stacked.device).Event()
    run.pending = [*numbers], stacked.to("cpu", non_blocking=True), sent  # into page-locked memory
    sent.record()
    if not stacked.is_cuda:
        act_on_numbers(run)


def act_on_numbers(run: Run) -> None:
    """Acts on the numbers that were sent to the host, if any.

    Every rank gets the same, at the same step. Raises `RunError` where the gradients stopped being
    finite, or too many steps in a row were skipped.
    """
    if run.pending is None:
        return
    state = run.state
    training = run.config.training
    names, stacked, sent = run.pending
    run.pending = None
    sent.synchronize()
    numbers = dict(zip(names, stacked.tolist(), strict=True))
    state.tokens += int(numbers["tokens"])
    for source in range(len(state.source_tokens)):
        state.source_tokens[source] += int(numbers[f"source_{source}"])
    state.skipped_steps += int(numbers["skipped"])
    is_broken = numbers["skipped"] and not numbers["finite"]
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if is_broken else 0
    run.interval.tokens += numbers["tokens"]
    run.stopping |= numbers["stop"] > 0
    run.save_wanted |= numbers["save"] > 0
    if not numbers["finite"] and not training.skip_nan_inf:
        kept = "the last checkpoint is from before that"
        if not run.saved_step:
            kept = "there is no checkpoint from before that, and the weights that the run began "
            kept += "with may not be finite themselves"
        raise RunError(
            f"the gradient norm is not finite (by step {state.step}); {kept}. "
            "training.skip_nan_inf = true would leave such steps out; a lower optimizer.lr or a "
            "longer lr_scheduler.warmup_steps often cures it."
        )
    if run.skipped_in_a_row >= training.max_skipped_steps:
        raise RunError(
            f"{run.skipped_in_a_row} steps in a row were skipped because their gradients are not "
            f"finite (training.max_skipped_steps): the run has diverged."
        )
