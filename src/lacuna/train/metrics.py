"""What a run reports: `metrics.jsonl`, TensorBoard, Weights & Biases, the terminal, and profiler traces."""

import json
import logging
import math
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import MofNCompleteColumn, Progress
from rich.text import Text

from lacuna.config import Config, explained, logger

# Dense bfloat16 tensor-core peak with float32 accumulation, TFLOP/s, by a part of the device's
# name: the first fits.
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

# What the terminal shows of a row, where it is known and not 0.
SHOWN = {
    "loss": "loss {:.4f}",
    "grad_norm": "norm {:.2f}",
    "lr": "lr {:.1e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "memory_gib": "{:.1f} GiB",
    "data_wait_fraction": "wait {:.0%}",
    "skipped_steps": "[red]skipped {}[/red]",
    "val_loss": "validation loss {:.4f} nats per token",
    "val_bits_per_byte": "{:.4f} bits per byte",
    "val_token_accuracy": "{:.1%} of tokens right",
    "reward_margin": "margin {:.3f}",
    "reward_accuracy": "{:.1%} of pairs right",
    "divergence": "divergence {:.4f}",
    "val_reward_margin": "margin {:.3f}",
    "val_reward_accuracy": "{:.1%} of pairs right",
}

PROFILER_WARMUP_STEPS = 3
ENDLESS = 100_000
MAX_MEMORY_ENTRIES = 100_000


def peak_flops(device: torch.device) -> float | None:
    """The device's bf16 peak in FLOP/s, or None (said once in the log) for a device not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next(
        (peak * 1e12 for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None
    )
    if peak is None:
        logger.warning("no bf16 peak is known for %r: mfu stays null", name)
    return peak


def peak_memory(device: torch.device) -> float:
    """Peak memory in GiB: what the allocator reserved on this GPU, or this process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def open_console(config: Config, visible: bool = True, **settings: Any) -> Console:
    """Where a command prints; what is no terminal, but a file or a pipe, gets lines as long as they are."""
    plain = config.metrics.disable_color_printing
    console = Console(no_color=plain, highlight=False, quiet=not visible, **settings)
    if not console.is_terminal:
        console.width = ENDLESS
    return console


def set_up_logging(config: Config, visible: bool) -> Console:
    """Sends log messages to the terminal (stderr), of the first rank only unless `visible`."""
    console = open_console(config, visible, stderr=True)
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(message)s", "%H:%M:%S"))
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_path=False, log_time_format="%H:%M:%S", markup=False
        )
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel("INFO" if visible else "ERROR")
    return console


def _open_rows(path: str, step: int) -> TextIO:
    """Opens a file of rows to add to, without those beyond `step`: a resume from there will write them anew.

    Lines that are no rows, as a disk or an editor may leave them, are told and left out.
    """
    lines = Path(path).read_bytes().splitlines(keepends=True) if os.path.exists(path) else []
    steps = [_step_of(line) for line in lines]
    whole = enumerate(zip(lines, steps, strict=True), start=1)
    if broken := [
        number for number, (line, found) in whole if found is None and line.endswith(b"\n")
    ]:
        logger.warning(
            "%s: line %d is no row; %d such lines are left out", path, broken[0], len(broken)
        )
    kept = b"".join(
        line
        for line, found in zip(lines, steps, strict=True)
        if found is not None and found <= step
    )
    if kept != b"".join(lines):
        Path(f"{path}.new").write_bytes(kept)
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
    """Writes rows of metrics to wherever the configuration wants them, and to `console`, which is quiet on most ranks.

    Only the first rank writes, unless `metrics.rank_0_only` is false. As a context it closes what
    it has opened.
    """

    def __init__(
        self, config: Config, rank: int, console: Console, start_step: int, total_steps: int
    ) -> None:
        super().__init__()
        settings, folder = config.metrics, str(config.job.dump_folder)
        self.console = console
        self._rows = self._samples = self._board = self._wandb = None
        self._parts = ("question  ", "\nanswer    ") if config.conversations else ("", "")
        kept = start_step or -1  # a run from the start measures step 0 again
        if rank == 0 or not settings.rank_0_only:
            name = "metrics.jsonl" if rank == 0 else f"metrics-rank-{rank}.jsonl"
            self._rows = self.enter_context(_open_rows(os.path.join(folder, name), kept))
            if settings.enable_tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                board = os.path.join(
                    folder, settings.save_tb_folder, f"rank-{rank}" if rank else ""
                )
                self._board = self.enter_context(SummaryWriter(board, purge_step=kept + 1))
        if rank == 0 and config.validation.prompts:
            self._samples = self.enter_context(
                _open_rows(os.path.join(folder, "samples.jsonl"), kept)
            )
        if rank == 0 and settings.enable_wandb:
            self._wandb = self.enter_context(_wandb_run(config))
        columns, hidden = Progress.get_default_columns(), console.quiet or not console.is_terminal
        progress = Progress(
            MofNCompleteColumn(), *columns, console=console, transient=True, disable=hidden
        )
        task = progress.add_task("step", total=total_steps, completed=start_step)
        # Moves the display: advance(completed=step).
        self.advance = partial(self.enter_context(progress).update, task)

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row; numbers that are not finite become null in the JSON file."""
        step = row["step"]
        numbers = {key: value for key, value in row.items() if key != "step" and value is not None}
        if self._rows is not None:
            finite = {
                key: value if math.isfinite(value or 0) else None for key, value in row.items()
            }
            self._rows.write(json.dumps(finite) + "\n")
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)
        shown = "  ".join(
            text.format(numbers[key]) for key, text in SHOWN.items() if numbers.get(key)
        )
        self.console.print(
            f"step {step:>6}  {shown}", soft_wrap=True, style="cyan" if "val_loss" in row else None
        )

    def write_sample(self, step: int, prompt: str, text: str) -> None:
        """Keeps and shows a text that the model wrote after `prompt`."""
        if self._samples is not None:
            self._samples.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
        before, between = self._parts
        start = (f"sample after step {step}\n{before}", "dim")
        self.console.print(Text.assemble(start, (prompt, "bold"), (between, "dim"), text))


def _wandb_run(config: Config) -> Any:
    mend = "pip install 'lacuna-train[wandb]', or leave the setting out"
    with explained(
        "metrics.enable_wandb: the wandb package is not installed", ImportError, mend=mend
    ):
        import wandb
    project, name = (
        os.environ.get("WANDB_PROJECT", "lacuna"),
        os.environ.get("WANDB_NAME", config.job.name),
    )
    return wandb.init(
        project=project,
        name=name,
        resume="allow",
        config=config.model_dump(),
        dir=config.job.dump_folder,
    )


@contextmanager
def profiled(config: Config, rank: int, start_step: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call after every step with the number of steps done.

    Every `profiling.profile_freq` steps a Chrome trace of one step, and a memory snapshot (GPU), go
    to `<dump_folder>/<save_…_folder>/step-N/rank-R…`.
    """
    settings = config.profiling
    every, warmup = settings.profile_freq, min(PROFILER_WARMUP_STEPS, settings.profile_freq - 1)

    def target(folder: str, step: int, kind: str) -> str:
        path = os.path.join(
            str(config.job.dump_folder), folder, f"step-{step}", f"rank-{rank}-{kind}"
        )
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def save_trace(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(
            target(settings.save_traces_folder, start_step + profiler.step_num, "trace.json")
        )

    def after_step(step: int) -> None:
        if profiler is not None:
            profiler.step()
        if settings.enable_memory_snapshot and step % every == 0:
            torch.cuda.memory._dump_snapshot(
                target(settings.save_memory_snapshot_folder, step, "memory.pickle")
            )

    if settings.enable_memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_ENTRIES)
    profiler = None
    if settings.enable_profiling:
        schedule = torch.profiler.schedule(wait=every - warmup - 1, warmup=warmup, active=1)
        profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=save_trace, record_shapes=True
        )
    with profiler or nullcontext():
        yield after_step
