"""One run in this process from start to end: what it says, trains, exports."""

import os
import time
from contextlib import nullcontext

import torch
from rich.console import Console

from lacuna.config import Config
from lacuna.config.describe import to_toml
from lacuna.export.huggingface import export_model
from lacuna.parallel.processes import on_first, start_process, stop_process
from lacuna.train.control import StopRequest, locked, stop_on_signals
from lacuna.train.metrics import set_up_logging
from lacuna.train.setup import Run, finished_step, mark_finished, save_seed, set_up
from lacuna.train.trainer import train


def train_here(config: Config) -> None:
    """Trains, from the newest checkpoint if there is one, in this process, one of those that the environment describes.

    Ends after the last step, or saves and ends on Ctrl-C or SIGTERM. Raises `UserError` and `RunError`.
    """
    first = int(os.environ.get("RANK", 0)) == 0
    console = set_up_logging(config, visible=first)
    with stop_on_signals() as stop, locked(str(config.job.dump_folder)) if first else nullcontext():
        _train(config, console, stop)


def _train(config: Config, console: Console, stop: StopRequest) -> None:
    process = start_process(config)
    done = on_first(process, lambda: finished_step(config))
    if done is not None:
        console.print(f"The run in {config.job.dump_folder} is finished (step {done}). To train it further, raise "
                      f"training.steps or epochs; to train anew, choose another job.dump_folder.")  # fmt: skip
        stop_process()
        return
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


def _introduce(run: Run, console: Console) -> None:
    """One screen about what is going to happen."""
    plan, config = run.plan, run.config
    tokens = plan.global_batch * config.training.seq_len
    ranks = plan.global_batch // (plan.micro_batch * plan.accumulation)
    console.print(
        f"[bold]{config.job.name}[/bold]: {run.built.parameters / 1e6:,.1f} M parameters on {run.process.world_size} × "
        f"{run.process.device.type}; {run.total_steps:,} steps of {plan.global_batch} × {config.training.seq_len} = "
        f"{tokens:,} tokens ({plan.micro_batch} sequences × {plan.accumulation} accumulated × {ranks} data-parallel); "
        f"writing to {config.job.dump_folder}"
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
        "curves": f"{folder}/metrics.jsonl; tensorboard --logdir {folder}",
        "try it": f"lacuna generate {folder} --prompt 'def main():' --temperature 0.8",
        "train on": f"lacuna train {folder}/config.toml {longer}",
        "larger": "lacuna train pretrain_124m.toml (lacuna train --help lists the recipes)",
        "your data": "lacuna train --data.dataset my.jsonl --job.name mine (rows with a text column)",
    }
    for name, way in ways_on.items():
        console.print(f"  {name:<10} {way}", soft_wrap=True)
