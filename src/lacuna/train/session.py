"""One run in this process from start to end: what it says, trains, exports."""

import json
import os
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.console import Console

from lacuna.config import Config, explained
from lacuna.export.huggingface import export_adapter, export_model
from lacuna.parallel.processes import Process, on_first, require_same_config, start_process, stop_process
from lacuna.train.checkpoint import model_tensors
from lacuna.train.metrics import set_up_logging
from lacuna.train.setup import Run
from lacuna.train.trainer import train

FINISHED = "finished.json"
LOCK_PATIENCE_SECONDS = 10.0


def stop_on_signals() -> list[int]:
    """The signals received so far: from now on SIGINT and SIGTERM only ask the loop to save and stop after the step.

    A second Ctrl-C stops at once.
    """
    received: list[int] = []

    def handle(number: int, _: object) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return received


def lock(folder: str) -> AbstractContextManager[object]:
    """Takes the lock of a run folder, until the end of the context or of the process, however it dies.

    Raises `UserError` when another run has it. Waits some seconds first, for workers of a killed run to be gone.
    """
    os.makedirs(folder, exist_ok=True)
    problem = f"job.dump_folder: another run is writing to {folder!r}"
    with explained(problem, Timeout, mend="stop it, or choose another folder"):
        return FileLock(os.path.join(folder, ".lock")).acquire(timeout=LOCK_PATIENCE_SECONDS)


def train_here(config: Config) -> None:
    """Trains, from the newest checkpoint if there is one, in this process, one of those that the environment describes.

    Ends after the last step, or saves and ends on Ctrl-C or SIGTERM. Raises `UserError` and `RunError`.
    """
    first = int(os.environ.get("RANK", 0)) == 0
    console = set_up_logging(config, visible=first)
    stop = stop_on_signals()
    with lock(str(config.job.dump_folder)) if first else nullcontext():
        process = start_process(config)
        require_same_config(config, process)
        done = on_first(process, lambda: finished_step(config))
        if done is None:
            _train(config, process, console, stop)
        else:
            console.print(f"The run in {config.job.dump_folder} is finished (step {done}). To train it further, raise "
                          f"training.steps or epochs; to train anew, choose another job.dump_folder.")  # fmt: skip
        stop_process()


def _train(config: Config, process: Process, console: Console, stop: list[int]) -> None:
    started = time.monotonic()
    run = Run(config, process, console)
    built, state, settings, folder = run.built, run.state, config.checkpoint, str(config.job.dump_folder)
    with run.metrics as ending:
        ending.callback(lambda: run.loader.close())  # the last one: a stage of the curriculum has its own
        console.print(
            f"[bold]{config.job.name}[/bold]: {built.parameters / 1e6:,.1f} M parameters on {process.world_size} × "
            f"{process.device.type}; {run.total_steps:,} steps of {run.plan.global_batch} × {config.training.seq_len} "
            f"tokens; writing to {folder}"
        )
        if settings.create_seed_checkpoint:  # for runs in any layout to start from
            run.saver.save(0, model_tensors(built.model), {"step": 0, "counters": vars(state)}, wait=True)
            console.print(f"Seed checkpoint written to {os.path.join(run.saver.folder, 'step-0')}.")
        elif train(run, stop):
            model, dtype = os.path.join(folder, "hf"), getattr(torch, settings.export_dtype)
            export_model(built.model, run.tokenizer, model, dtype, config.model.name_or_path)
            if config.lora.rank:
                beside = os.path.join(model, "adapter")
                export_adapter(built.model, run.tokenizer, config.lora, config.model.name_or_path, beside)
            on_first(process, lambda: mark_finished(config, state.step))
            console.print(
                f"Done: {state.step:,} steps, {state.tokens:,} tokens in {time.monotonic() - started:.0f} s.\n"
                f"  model      {model}, which transformers' AutoModelForCausalLM.from_pretrained opens\n"
                f"  curves     {folder}/metrics.jsonl; tensorboard --logdir {folder}\n"
                f"  try it     lacuna generate {folder} --prompt 'def main():' --temperature 0.8\n"
                f"  train on   lacuna train {folder}/config.toml, with more training.steps or epochs\n"
                "  your data  lacuna train --data.dataset my.jsonl --job.name mine (rows with a text column)",
                soft_wrap=True,
            )
        else:
            console.print(f"Stopped and saved after step {state.step}. The same command goes on from there.")


def finished_step(config: Config) -> int | None:
    """The step at which the run in this folder came to the end that `config` asks for, or None."""
    path = Path(str(config.job.dump_folder), FINISHED)
    if not path.exists() or config.checkpoint.load_step >= 0:  # who names a step wants to go back to it
        return None
    done, wanted = json.loads(path.read_text()), config.training
    enough = wanted.steps <= done["steps"] if wanted.steps is not None else wanted.epochs == done["epochs"]
    return done["step"] if enough else None


def mark_finished(config: Config, step: int) -> None:
    """Notes in the run folder that the run came to its end, which patience may have brought before its last step."""
    path, training = Path(str(config.job.dump_folder), FINISHED), config.training
    note = {"step": step, "steps": max(training.steps or 0, step), "epochs": training.epochs}
    path.with_suffix(".new").write_text(json.dumps(note))
    path.with_suffix(".new").replace(path)
