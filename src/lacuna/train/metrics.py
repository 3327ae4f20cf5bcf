"""What a run reports: to `metrics.jsonl`, TensorBoard, Weights & Biases, the terminal."""

import json
import math
import os
import re
import resource
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.text import Text

from lacuna.config import explained, logger
from lacuna.config.machine import MetricsConfig

# Part of a device's name -> its dense bfloat16 peak with float32 accumulation, TFLOP/s. The first
# part that the name has counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GB200": 2500.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A6000": 154.8,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
    "MI325X": 1307.4,
    "MI250X": 191.5,
}

# What the terminal shows of a row, where it is known and, but for NEWS_AT_0, not 0.
SHOWN = {
    "loss": "loss {:.4f}",
    "grad_norm": "norm {:.2f}",
    "lr": "lr {:.1e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "memory_gib": "{:.1f} GiB",
    "data_wait_fraction": "wait {:.0%}",
    "router_violation": "violation {:.2f}",
    "attention_sinks_0.3": "sinks {:.1%}",
    "attention_sparsity": "sparsity {:.1%}",
    "hidden_kurtosis": "kurtosis {:.1f}",
    "hidden_largest": "largest {:.1f}",
    "skipped_steps": "[red]skipped {}[/red]",
    "val_loss": "validation loss {:.4f}",
    "val_bits_per_byte": "{:.4f} bits per byte",
    "val_token_accuracy": "{:.1%} of tokens right",
    "reward": "reward {:.3f}",
    "val_reward": "validation reward {:.3f}",
    "val_pass_at_1": "{:.1%} of held-out prompts solved",
    "val_completion_tokens": "{:.0f} tokens a completion",
    "completion_tokens": "{:.0f} tokens a completion",
    "reward_margin": "margin {:.3f}",
    "reward_accuracy": "{:.1%} of pairs right",
    "divergence": "divergence {:.4f}",
    "val_reward_margin": "margin {:.3f}",
    "val_reward_accuracy": "{:.1%} of pairs right",
    "score_margin": "margin {:.3f}",
    "score_accuracy": "{:.1%} of pairs right",
    "val_score_margin": "margin {:.3f}",
    "val_score_accuracy": "{:.1%} of pairs right",
}
NEWS_AT_0 = {
    key
    for key in SHOWN
    if key.endswith(("loss", "reward", "accuracy", "margin")) or key == "val_pass_at_1"
}


def peak_flops(device: torch.device) -> float | None:
    """The device's bf16 peak in FLOP/s; None, with a warning, if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, peak in PEAK_TFLOPS.items():
        if re.search(rf"\b{part}\b", name):
            return peak * 1e12
    logger.warning("no bf16 peak is known for %r: mfu stays null", name)
    return None


def peak_memory(device: torch.device) -> float:
    """Peak memory in GiB.

    That is what the allocator reserved on this GPU, or this process's resident set on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _open_rows(path: str, step: int) -> TextIO:
    """Opens a file of rows to add to, and drops those beyond `step`: a resume writes them anew.

    Lines that are no rows, as a disk or an editor may leave them, are dropped too, and logged.
    """
    lines = Path(path).read_bytes().splitlines(keepends=True) if os.path.exists(path) else []
    kept, broken = [], []
    for number, line in enumerate(lines, start=1):
        found = _step_of(line)
        if found is None and line.endswith(b"\n"):
            broken.append(number)
        elif found is not None and found <= step:
            kept.append(line)
    if broken:
        said = "%s: line %d is no row; %d such lines are left out"
        logger.warning(said, path, broken[0], len(broken))
    if kept != lines:
        Path(f"{path}.new").write_bytes(b"".join(kept))
        os.replace(f"{path}.new", path)
    return open(path, "a", buffering=1)


def _step_of(line: bytes) -> int | None:
    """The step of a line of a file of rows, None where it is not a whole row."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if isinstance(step, int) else None


class MetricWriter(ExitStack):
    """Writes rows of metrics to wherever the configuration wants them, and to the console.

    The console is quiet on all ranks but the first. Files are written by the first rank alone,
    unless `metrics.rank_0_only` is false. Weights & Biases is `told` all settings of the run. As a
    context it closes what it has opened.
    """

    def __init__(
        self,
        settings: MetricsConfig,
        name: str,
        folder: str,
        is_chat: bool,
        samples_text: bool,
        rank: int,
        console: Console,
        start_step: int,
        total_steps: int,
        told: dict[str, Any],
    ) -> None:
        super().__init__()
        self.console = console
        self._rows = self._samples = self._board = self._wandb = None
        self._parts = ("question  ", "\nanswer    ") if is_chat else ("", "")
        kept = start_step or -1  # a run from the start measures step 0 again
        if rank == 0 or not settings.rank_0_only:
            file = "metrics.jsonl" if rank == 0 else f"metrics-rank-{rank}.jsonl"
            self._rows = self.enter_context(_open_rows(os.path.join(folder, file), kept))
            if settings.enable_tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                own = f"rank-{rank}" if rank else ""
                board = os.path.join(folder, settings.save_tb_folder, own)
                self._board = self.enter_context(SummaryWriter(board, purge_step=kept + 1))
        if rank == 0 and samples_text:
            samples = os.path.join(folder, "samples.jsonl")
            self._samples = self.enter_context(_open_rows(samples, kept))
        if rank == 0 and settings.enable_wandb:
            self._wandb = self.enter_context(_wandb_run(name, folder, told))
        columns = (MofNCompleteColumn(), *Progress.get_default_columns())
        hidden = console.quiet or not console.is_terminal
        progress = Progress(*columns, console=console, transient=True, disable=hidden)
        task = progress.add_task("step", total=total_steps, completed=start_step)
        # Moves the display: advance(completed=step).
        self.advance = partial(self.enter_context(progress).update, task)

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row; numbers that are not finite become null in the JSON file.

        Lists of numbers are in that file alone.
        """
        step = row["step"]
        lists = {key: value for key, value in row.items() if isinstance(value, list)}
        numbers = {
            key: value
            for key, value in row.items()
            if key != "step" and value is not None and key not in lists
        }
        if self._rows is not None:
            finite = dict.fromkeys(row) | lists
            finite |= {key: value for key, value in numbers.items() if math.isfinite(value)}
            finite["step"] = step
            self._rows.write(json.dumps(finite) + "\n")
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)
        texts = [
            text.format(numbers[key])
            for key, text in SHOWN.items()
            if numbers.get(key) or key in NEWS_AT_0 & numbers.keys()
        ]
        style = "cyan" if {"val_loss", "val_reward"} & row.keys() else None
        self.console.print(f"step {step:>6}  {'  '.join(texts)}", soft_wrap=True, style=style)

    def write_sample(self, step: int, prompt: str, text: str) -> None:
        """Keeps and shows a text that the model wrote after `prompt`."""
        if self._samples is not None:
            self._samples.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
        before, between = self._parts
        start = (f"sample after step {step}\n{before}", "dim")
        self.console.print(Text.assemble(start, (prompt, "bold"), (between, "dim"), text))


def _wandb_run(name: str, folder: str, told: dict[str, Any]) -> Any:
    """Starts or resumes the run at Weights & Biases, which is `told` its settings.

    Raises `UserError` without their package.
    """
    absent = "metrics.enable_wandb: the wandb package is not installed"
    mend = "pip install -e '.[wandb]' -c constraints.txt, or leave the setting out"
    with explained(absent, ImportError, mend=mend):
        import wandb
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "lacuna"),
        name=os.environ.get("WANDB_NAME", name),
        resume="allow",
        config=told,
        dir=folder,
    )
