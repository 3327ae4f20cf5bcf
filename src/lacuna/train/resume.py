"""The state of a run that survives it, and where a run starts from."""

import logging
import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lacuna.config import Config, UserError
from lacuna.data import Loader, merge_states
from lacuna.model.architecture import stored_tensors
from lacuna.parallel.processes import Process, gather_objects
from lacuna.train import checkpoint

logger = logging.getLogger(__name__)

# What decides which samples a step trains on, and must stay in a run that goes on: all of data but these, and those.
_FREE_OF_DATA = {"num_workers", "prefetch_factor", "max_broken_records", "retries"}
_FIXED_OF_TRAINING = {"seq_len", "context_len", "varlen", "seed"}


@dataclass
class TrainState:
    """Counters of a run. `step` is the number of steps done, `tokens` (`source_tokens`) those seen by all ranks."""

    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    best_loss: float = float("inf")
    best_step: int | None = None
    worse_validations: int = 0
    source_tokens: list[int] = field(default_factory=list)

    def source_shares(self, config: Config) -> dict[str, float]:
        """The share of all tokens so far that each source gave, when there are several."""
        seen, sources = self.source_tokens, config.data.resolved_sources()
        shares = {f"share_{index}_{source.dataset}": seen[index] / sum(seen) for index, source in enumerate(sources)}
        return shares if len(shares) > 1 else {}


def find_start(config: Config, folder: str, process: Process) -> tuple[str | None, dict[str, Any] | None]:
    """The checkpoint that the weights come from, if any, and its state where everything else does too.

    That is the newest complete checkpoint in `folder` or the one asked for; `step-0` and
    `checkpoint.initial_load_path` give weights only. Raises `UserError` for one that cannot be used.
    """
    settings, path = config.checkpoint, None
    if settings.enable_checkpoint and settings.load_step >= 0:
        asked = checkpoint.checkpoint_path(folder, settings.load_step)
        path = checkpoint.require_complete(asked, "checkpoint.load_step", process)
    elif settings.enable_checkpoint:
        path = checkpoint.newest_complete(folder, process)
    state = {"step": 0} if path is None else checkpoint.read_state(path)
    if path is None and settings.initial_load_path:
        path = checkpoint.require_complete(settings.initial_load_path, "checkpoint.initial_load_path", process)
    if state["step"] == 0:
        if path is not None:
            logger.info("starting from the weights in %s", path)
        return path, None
    if not checkpoint.has_optimizer(path):
        raise UserError(
            f"checkpoint.load_step: {path} holds weights only (checkpoint.model_weights_only), so the run cannot go "
            f"on from it: start a new run with checkpoint.initial_load_path = {path!r}."
        )
    _require_same_samples(config, state["settings"], path)
    logger.info("resuming after step %d from %s", state["step"], path)
    return path, state


def _sample_settings(config: Config) -> dict[str, str]:
    """The settings that decide which samples a step trains on, by dotted name, as text."""
    tables = {
        "data": config.data.model_dump(exclude=_FREE_OF_DATA),
        "training": config.training.model_dump(include=_FIXED_OF_TRAINING),
    }
    return {f"{section}.{name}": repr(value) for section, table in tables.items() for name, value in table.items()}


def _require_same_samples(config: Config, saved: dict[str, str], path: str) -> None:
    now = _sample_settings(config)
    changed = [f"{name}: {saved[name]} in the checkpoint, {now[name]} now" for name in now if now[name] != saved[name]]
    if changed:
        raise UserError(
            f"the run in {os.path.dirname(path)} cannot go on with other samples:\n  " + "\n  ".join(changed) + "\n"
            "Restore these settings, or start in another job.dump_folder "
            f"(checkpoint.initial_load_path = {path!r} takes its weights along)."
        )


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and persistent buffers by name, `model.<name>`, tied ones once, not copied."""
    return {f"model.{name}": tensor.detach() for name, tensor in stored_tensors(model).items()}


def saved_state(
    config: Config, global_batch: int, counters: TrainState, loader: Loader, process: Process
) -> dict[str, Any]:
    """What a checkpoint holds beside tensors; all ranks must call it."""
    return {
        "step": counters.step,
        "counters": vars(counters).copy(),
        "global_batch": global_batch,
        "settings": _sample_settings(config),
        "ranks": gather_objects(process, {"data": loader.state_dict(), "random": _random_states()}),
    }


def restore(state: dict[str, Any], loader: Loader, process: Process) -> TrainState:
    """Puts data and random numbers where a checkpoint of this `state` left them, in place; returns its counters."""
    ranks = state["ranks"]
    loader.load_state_dict(merge_states([rank["data"] for rank in ranks]))
    if len(ranks) == process.world_size:
        _set_random_states(ranks[process.rank]["random"])
    return TrainState(**state["counters"])


def _random_states() -> dict[str, Any]:
    """Every random state of this process, in types that `torch.load(weights_only=True)` accepts."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
