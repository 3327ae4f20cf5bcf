"""`lacuna train`: trains, or with --dry-run says what would be trained."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lacuna.config import Config, UserError, load_config
from lacuna.config.describe import help_text, to_toml
from lacuna.config.packaged import recipe_names
from lacuna.launch import launch, runs_here

if TYPE_CHECKING:  # torch takes seconds to import: not for --help or a wrong setting
    from rich.console import Console

    from lacuna.train.control import StopRequest
    from lacuna.train.setup import Run

USAGE = """usage: lacuna train [RUN.toml] [--section.key value ...] [--gpus N | --cpus N] [--dry-run]

Trains the model that RUN.toml describes; without a file, the embedded quickstart. A run that was stopped goes on
where its last checkpoint left it when it is started again.

  RUN.toml         settings in TOML, one table per section; also a recipe of lacuna's own:
                   {recipes}
  --section.key V  one setting, over the file's; V may be left out for true
  --gpus N         processes, one per GPU (default: all GPUs, or $NGPU)
  --cpus N         processes on the CPU instead (default without a GPU: 1)
  --dry-run        check everything, show sizes, steps and memory, and stop

Every setting, with its default:
"""


@dataclass(frozen=True)
class TrainArguments:
    """The words after `lacuna train`, sorted."""

    path: str | None
    flags: tuple[str, ...]
    gpus: int | None
    cpus: int | None
    dry_run: bool


def parse_arguments(words: Sequence[str]) -> TrainArguments:
    """Takes the launcher's own options and the file out of `words`; the rest are settings.

    Raises `UserError` for a count that is none.
    """
    path, flags, counts, dry_run = None, [], {}, False
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, _, value = word.partition("=")
        if name in ("--gpus", "--cpus"):
            value = value or (remaining.pop(0) if remaining else "")
            if not value.isdigit() or int(value) < 1:
                raise UserError(f"{name}: wants a number of processes of at least 1, not {value!r}.")
            counts[name] = int(value)
        elif word in ("--dry-run", "--dry_run"):
            dry_run = True
        elif not flags and path is None and not word.startswith("-"):
            path = word
        else:
            flags.append(word)
    if len(counts) == 2:
        raise UserError("--gpus and --cpus exclude each other: give one.")
    return TrainArguments(path, tuple(flags), counts.get("--gpus"), counts.get("--cpus"), dry_run)


def run(words: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE.format(recipes=", ".join(recipe_names())) + help_text())
        return 0
    arguments = parse_arguments(words)
    config = load_config(arguments.path, arguments.flags)
    if arguments.cpus:
        os.environ["LACUNA_DEVICE"] = "cpu"
    if arguments.dry_run or config.memory_estimation.enabled:
        from lacuna.plan.dry_run import dry_run

        quiet_libraries()
        dry_run(config, runs_here(arguments.gpus, arguments.cpus))
        return 0
    processes = runs_here(arguments.gpus, arguments.cpus)
    if processes > 1:
        return launch(["train", *words], processes, str(config.job.dump_folder))
    return train_here(config)


def train_here(config: Config) -> int:
    """Trains in this process, one of those that the environment describes."""
    quiet_libraries()
    from lacuna.train.control import locked, stop_on_signals
    from lacuna.train.metrics import set_up_logging

    with stop_on_signals() as stop:
        first = int(os.environ.get("RANK", 0)) == 0
        console = set_up_logging(config, visible=first)
        if first:
            with locked(str(config.job.dump_folder)):
                return _train(config, console, stop)
        return _train(config, console, stop)


def quiet_libraries() -> None:
    """Progress bars and advice of libraries would drown the run's own display."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is, for convert and generate
    # Fragmentation is what long runs die of; must be set before the first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _train(config: Config, console: Console, stop: StopRequest) -> int:
    import torch

    from lacuna.export.huggingface import export_model
    from lacuna.parallel.processes import on_first, start_process, stop_process
    from lacuna.train.setup import finished_step, mark_finished, save_seed, set_up
    from lacuna.train.trainer import train

    process = start_process(config)
    done = on_first(process, lambda: finished_step(config))
    if done is not None:
        console.print(f"The run in {config.job.dump_folder} is finished (step {done}). To train it further, raise "
                      f"training.steps or epochs; to train anew, choose another job.dump_folder.")  # fmt: skip
        stop_process()
        return 0
    if config.job.print_args and process.is_first:
        print(to_toml(config))
    started = time.monotonic()
    run = set_up(config, process, console)
    try:
        _introduce(run, console)
        ended = config.checkpoint.create_seed_checkpoint or train(run, stop)
        if config.checkpoint.create_seed_checkpoint:
            save_seed(run)
        elif ended:
            folder = os.path.join(str(config.job.dump_folder), "hf")
            dtype = getattr(torch, config.checkpoint.export_dtype)
            export_model(run.built.model, run.tokenizer, folder, dtype, process.is_first, config.model.name_or_path)
            on_first(process, lambda: mark_finished(config, run.state.step))
    finally:
        run.metrics.close()
        run.loader.close()
    _say_goodbye(run, ended, time.monotonic() - started, console)
    stop_process()
    return 0


def _introduce(run: Run, console: Console) -> None:
    """One screen about what is going to happen."""
    plan, config = run.plan, run.config
    tokens = plan.global_batch * config.training.seq_len
    where = f"{run.process.world_size} × {run.process.device.type}"
    console.print(
        f"[bold]{config.job.name}[/bold]: {run.built.parameters / 1e6:,.1f} M parameters on {where}; "
        f"{run.total_steps:,} steps of {plan.global_batch} × {config.training.seq_len} = {tokens:,} tokens "
        f"(global_batch_size = {plan.micro_batch} × {plan.accumulation} accumulated × "
        f"{plan.global_batch // (plan.micro_batch * plan.accumulation)} ranks); writing to {config.job.dump_folder}"
    )


def _say_goodbye(run: Run, ended: bool, seconds: float, console: Console) -> None:
    """What was done, and how to go on."""
    folder = str(run.config.job.dump_folder)
    if run.config.checkpoint.create_seed_checkpoint:
        console.print(f"Seed checkpoint written to {os.path.join(run.saver.folder, 'step-0')}.")
        return
    if not ended:
        console.print(f"Stopped and saved after step {run.state.step}. The same command goes on from there.")
        return
    console.print(f"Done: {run.state.step:,} steps, {run.state.tokens:,} tokens in {seconds:.0f} s.")
    epochs = run.config.training.epochs
    longer = f"--training.epochs {epochs * 2}" if epochs else f"--training.steps {run.total_steps * 2}"
    ways_on = {
        "model": f"{folder}/hf, which transformers' AutoModelForCausalLM.from_pretrained opens",
        "curves": f"tensorboard --logdir {folder}/{run.config.metrics.save_tb_folder}",
        "try it": f"lacuna generate {folder} --prompt 'def main():' --temperature 0.8",
        "train on": f"lacuna train {folder}/config.toml {longer}",
        "larger": "lacuna train pretrain_124m.toml (lacuna train --help lists the recipes)",
        "your data": "lacuna train --data.dataset my.jsonl --job.name mine (rows with a text column)",
    }
    for name, way in ways_on.items():
        console.print(f"  {name:<10} {way}", soft_wrap=True)
