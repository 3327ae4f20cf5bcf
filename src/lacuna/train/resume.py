"""The state of a run that survives it, and where a run starts from."""

import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import Config, UserError
from lacuna.parallel.processes import Process
from lacuna.train.checkpoint import (
    checkpoint_path,
    has_optimizer,
    newest_complete,
    read_state,
    read_tensors,
    require_complete,
)

# What decides which samples a step trains on; a run that goes on must keep them.
_SAMPLE_SETTINGS = {
    "data": (
        "dataset", "dataset_name", "dataset_split", "data_dir", "data_files", "data_probs", "sources", "streaming",
        "document_mask", "predict_across_documents", "shuffle", "text_column", "tokenization",
    ),
    "training": ("seq_len", "context_len", "varlen", "seed"),
}  # fmt: skip


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

    def count_sources(self, tokens: list[float]) -> None:
        """Adds a step's tokens of each source."""
        seen = self.source_tokens or [0] * len(tokens)
        self.source_tokens = [before + int(more) for before, more in zip(seen, tokens, strict=True)]


@dataclass(frozen=True)
class Start:
    """Where a run starts: weights from `path` if given, and with `state` everything else from there too."""

    path: str | None = None
    state: dict[str, Any] | None = None


def find_start(config: Config, folder: str, process: Process) -> Start:
    """The newest complete checkpoint in `folder` or the one asked for, else a fresh start.

    `step-0` and `checkpoint.initial_load_path` give weights only. Raises `UserError` for one that cannot be used.
    """
    settings = config.checkpoint
    if settings.enable_checkpoint:
        if settings.load_step >= 0:
            path = checkpoint_path(folder, settings.load_step)
            require_complete(path, "checkpoint.load_step", process)
        else:
            path = newest_complete(folder, process)
        if path is not None:
            state = read_state(path)
            if state["step"] == 0:
                return Start(path)
            if not has_optimizer(path):
                raise UserError(
                    f"checkpoint.load_step: {path} holds weights only (checkpoint.model_weights_only), so the run "
                    f"cannot go on from it: start a new run with checkpoint.initial_load_path = {path!r}."
                )
            _require_same_samples(config, state["settings"], path)
            return Start(path, state)
    if settings.initial_load_path:
        return Start(require_complete(settings.initial_load_path, "checkpoint.initial_load_path", process))
    return Start()


def sample_settings(config: Config) -> dict[str, str]:
    """The settings that decide which samples a step trains on, by dotted name, as text."""
    return {
        f"{section}.{name}": repr(getattr(getattr(config, section), name))
        for section, names in _SAMPLE_SETTINGS.items()
        for name in names
    }


def _require_same_samples(config: Config, saved: dict[str, str], path: str) -> None:
    now = sample_settings(config)
    changed = [f"{name}: {saved[name]} in the checkpoint, {now[name]} now" for name in now if now[name] != saved[name]]
    if changed:
        raise UserError(
            f"the run in {os.path.dirname(path)} cannot go on with other samples:\n  " + "\n  ".join(changed) + "\n"
            "Restore these settings, or start in another job.dump_folder "
            f"(checkpoint.initial_load_path = {path!r} takes its weights along)."
        )


def model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights and persistent buffers by name, `model.<name>`, tied ones once, not copied."""
    persistent = set(model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {f"model.{name}": tensor.detach() for name, tensor in (dict(model.named_parameters()) | buffers).items()}


def restore_model(model: PreTrainedModel, path: str, process: Process) -> None:
    """Fills the weights of `model` in place from the checkpoint at `path`."""
    read_tensors(path, model_tensors(model), process)


def random_states() -> dict[str, Any]:
    """Every random state of this process, in types that `torch.load(weights_only=True)` accepts."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Puts this process's random states back to what `random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_everything(seed: int, rank: int) -> None:
    """Seeds every generator; ranks differ, so that dropout does."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)
