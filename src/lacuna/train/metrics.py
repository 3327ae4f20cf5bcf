"""What a run reports: `metrics.jsonl`, TensorBoard, Weights & Biases, and the terminal."""

import json
import logging
import math
import os
import re
import sys
from typing import Any

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from lacuna.config import Config, UserError

logger = logging.getLogger(__name__)

# Dense bfloat16 tensor-core peak with float32 accumulation, TFLOP/s, by a part of the device's name.
PEAK_TFLOPS = {
    "B200": 2250.0, "GB200": 2500.0, "GH200": 989.0, "H200": 989.0, "H100 NVL": 835.0, "H100 PCIe": 756.0,
    "H100": 989.0, "H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "A40": 149.7, "A10G": 70.0,
    "A6000": 154.8, "L40S": 362.0, "L4": 121.0, "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71.0,
    "MI300X": 1307.4, "MI325X": 1307.4, "MI250X": 191.5,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """The device's bf16 peak in FLOP/s, or None (said once in the log) for a device not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_TFLOPS if re.search(rf"\b{key}\b", name)]
    if not known:
        logger.warning("no bf16 peak is known for %r: mfu stays null", name)
        return None
    return PEAK_TFLOPS[max(known, key=len)] * 1e12


def set_up_logging(config: Config, visible: bool) -> Console:
    """Sends log messages to the terminal (stderr), of the first rank only unless `visible`."""
    plain = config.metrics.disable_color_printing
    console = Console(stderr=True, no_color=plain, highlight=False, quiet=not visible)
    handler = RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S", markup=False)
    root = logging.getLogger("lacuna")
    root.handlers, root.propagate = [handler], False
    root.setLevel(logging.INFO if visible else logging.ERROR)
    return console


def drop_rows_after(path: str, step: int) -> None:
    """Removes rows beyond `step` from a metrics file, as a resume from `step` will write them anew."""
    if not os.path.exists(path):
        return
    with open(path) as file:
        lines = [line for line in file if line.endswith("\n") and json.loads(line)["step"] <= step]
    with open(path + ".new", "w") as file:
        file.writelines(lines)
    os.replace(path + ".new", path)


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricWriter:
    """Writes rows of metrics to wherever the configuration wants them. Silent on ranks that do not write."""

    def __init__(self, config: Config, rank: int, console: Console, start_step: int, total_steps: int) -> None:
        self.console = console
        self.first = rank == 0
        self.writes = self.first or not config.metrics.rank_0_only
        folder = str(config.job.dump_folder)
        self._file = self._board = self._wandb = None
        if self.writes:
            name = "metrics.jsonl" if self.first else f"metrics-rank-{rank}.jsonl"
            path = os.path.join(folder, name)
            for rewritten in (path, os.path.join(folder, "samples.jsonl")) if self.first else (path,):
                drop_rows_after(rewritten, start_step or -1)  # a run from the start measures step 0 again
            self._file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the run)
            if config.metrics.enable_tensorboard:
                self._board = _tensorboard(os.path.join(folder, config.metrics.save_tb_folder), rank, start_step)
        if self.first and config.metrics.enable_wandb:
            self._wandb = _wandb_run(config)
        self._progress = Progress(
            TextColumn("[bold]step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[summary]}"),
            TimeElapsedColumn(), TextColumn("<"), TimeRemainingColumn(),
            console=console, transient=True, disable=not (self.first and sys.stderr.isatty()),
        )  # fmt: skip
        self._task = self._progress.add_task("train", total=total_steps, completed=start_step, summary="")
        self._progress.start()

    def advance(self, step: int) -> None:
        """Moves the progress display to `step`."""
        self._progress.update(self._task, completed=step)

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row; numbers that are not finite become null in the JSON file."""
        step = row["step"]
        if self._file is not None:
            self._file.write(json.dumps({key: _json_number(value) for key, value in row.items()}) + "\n")
        numbers = {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)
        if self.first:
            self._show(row)

    def _show(self, row: dict[str, Any]) -> None:
        if "val_loss" in row:
            bits = row["val_bits_per_byte"]
            shown = "" if bits is None or not math.isfinite(bits) else f"  {bits:.4f} bits per byte"
            self.console.print(
                f"[cyan]step {row['step']:>6}  validation loss {row['val_loss']:.4f} nats per token{shown}"
            )
            return
        mfu = "" if row["mfu"] is None else f"  mfu {row['mfu']:.1%}"
        skipped = f"  [red]skipped {row['skipped_steps']}[/red]" if row["skipped_steps"] else ""
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        self._progress.update(self._task, summary=f"loss {row['loss']:.4f}  {speed}")
        self.console.print(
            f"step {row['step']:>6}  loss {row['loss']:.4f}  norm {row['grad_norm']:.2f}  lr {row['lr']:.1e}  "
            f"{speed}{mfu}  {row['memory_gib']:.1f} GiB  wait {row['data_wait_fraction']:.0%}{skipped}",
            soft_wrap=True,
        )

    def show_sample(self, step: int, prompt: str, text: str) -> None:
        """Prints a sampled text."""
        if self.first:
            sample = Text.assemble((prompt, "bold"), text)
            self.console.print(Panel(sample, title=f"sample after step {step}", title_align="left", border_style="dim"))

    def close(self) -> None:
        """Flushes and closes everything."""
        self._progress.stop()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _tensorboard(folder: str, rank: int, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    folder = folder if rank == 0 else os.path.join(folder, f"rank-{rank}")
    return SummaryWriter(folder, purge_step=start_step + 1 if start_step else None)


def _wandb_run(config: Config) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "metrics.enable_wandb: the wandb package is not installed: pip install 'lacuna-train[wandb]', "
            "or set metrics.enable_wandb = false."
        ) from error
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "lacuna"),
        name=os.environ.get("WANDB_NAME", config.job.name),
        id=os.environ.get("WANDB_RUN_ID"),
        resume=os.environ.get("WANDB_RESUME", "allow"),
        config=config.model_dump(),
        dir=config.job.dump_folder,
    )
