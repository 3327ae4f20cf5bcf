"""What the drivers of other trainers share: the task that lacuna left, and the measuring of it."""

import json
import os
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lacuna.config.orphans import end_with_parent
from lacuna.data.fla_models import register_models
from lacuna.model.architecture import is_from_fla
from lacuna.train.bench import spread

RANK = int(os.environ.get("RANK", 0))


def end_process() -> NoReturn:
    """Ends this process where it is done.

    A thread of gloo may still hold a tensor of Python's, which ends an ordinary end by SIGABRT.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Task:
    """The steps to make, and when the windows in them ended.

    Attributes:
        folder: what `lacuna bench` wrote: task.json, a model's config.json, tokens of every rank.
        settings: what task.json says.
        tokens: this rank's micro-batches, in their order.
    """

    def __init__(self, folder: str) -> None:
        end_with_parent(os.getppid())
        self.folder = folder
        self.settings: dict[str, Any] = json.loads(Path(folder, "task.json").read_text())
        self.tokens = torch.load(Path(folder, f"tokens-{RANK}.pt"))
        self.is_on_gpu = self.settings["device"] == "cuda"
        self._moments: list[float] = []

    def after_step(self, step: int) -> None:
        """Notes the time where a window begins or ends with this step, counted from 1."""
        beyond = step - self.settings["warm_up"]
        if beyond >= 0 and beyond % self.settings["window"] == 0:
            if self.is_on_gpu:
                torch.cuda.synchronize()
            self._moments.append(time.perf_counter())

    def write(self, first_loss: float, **more: Any) -> None:
        """Writes what was measured, on the first rank; memory is that of this rank."""
        if RANK > 0:
            return
        seconds = [end - start for start, end in pairwise(self._moments)]
        window = self.settings["window"]
        tokens = self.settings["tokens_of_steps"][self.settings["warm_up"] :]
        counts = [sum(tokens[first : first + window]) for first in range(0, len(tokens), window)]
        speeds = [count / time for count, time in zip(counts, seconds, strict=True)]
        memory: dict[str, float | None] = {
            "reserved": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "allocated": None,
        }
        if self.is_on_gpu:
            memory = {
                "reserved": torch.cuda.max_memory_reserved() / 2**30,
                "allocated": torch.cuda.max_memory_allocated() / 2**30,
            }
        measured = {
            "first_loss": first_loss,
            "window_seconds": seconds,
            "tokens_per_second": spread(speeds),
            "memory_gib": memory,
            **more,
        }
        Path(self.folder, "measured.json").write_text(json.dumps(measured))


def make_model(task: Task) -> PreTrainedModel:
    """The model of the task, from its files or drawn as lacuna draws it."""
    settings = task.settings
    dtype = getattr(torch, settings["dtype"])
    trust = settings["trust_remote_code"]
    source = settings["weights"] or task.folder
    register_models(source)
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
    options = {"dtype": dtype}
    if not is_from_fla(config):  # whose kernels are its own
        options["attn_implementation"] = settings["attention"]
    if settings["weights"]:
        return AutoModelForCausalLM.from_pretrained(
            settings["weights"], trust_remote_code=trust, **options
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust, **options)
    model.to_empty(device=settings["device"])
    torch.manual_seed(settings["seed"])
    model.initialize_weights()
    model.tie_weights()
    return model
