"""One run in this process from start to end: what it says, trains, exports."""

import json
import os
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout
from rich.console import Console

from lacuna.config import LAUNCHED, Config, explained, logger, make_folder
from lacuna.data import workers_told
from lacuna.data.disk import replace_text
from lacuna.parallel.processes import (
    Process,
    answered,
    gather_objects,
    on_first,
    require_same_config,
    start_process,
    stop_process,
)
from lacuna.train.branch import goes_back
from lacuna.train.checkpoint import model_tensors
from lacuna.train.hints import closing_hints
from lacuna.train.metrics import set_up_logging
from lacuna.train.setup import Run
from lacuna.train.trainer import train

FINISHED = "finished.json"
LOCK_PATIENCE_SECONDS = 10.0


def stop_on_signals() -> list[int]:
    """The signals received so far: from now on SIGINT and SIGTERM only ask the loop to save and stop after the step.

    A second Ctrl-C does what a first one did before. A thread sees to that, as the main one may
    wait for other ranks and learn of no signal for as long.
    """
    received: list[int] = []
    at_once = signal.getsignal(signal.SIGINT)
    news, noted = os.pipe()
    os.set_blocking(noted, False)
    signal.set_wakeup_fd(noted, warn_on_full_buffer=False)

    def watch() -> None:
        asked = False
        while True:
            number = os.read(news, 1)[0]
            if asked and number == signal.SIGINT and callable(at_once):
                at_once(number, None)
            asked |= number in (signal.SIGINT, signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    return received


def lock(folder: str) -> AbstractContextManager[object]:
    """Takes the lock of a run folder, until the end of the context or of the process, however it dies.

    Raises `UserError` when another run has it. Waits some seconds first, for workers of a killed
    run to be gone.
    """
    make_folder(folder)
    closed = explained(
        f"job.dump_folder: cannot write to {folder!r}", OSError, mend="choose another folder"
    )
    problem = f"job.dump_folder: another run is writing to {folder!r}"
    taken_already = explained(problem, Timeout, mend="stop it, or choose another folder")
    # A file, as that of the lock may be there, and writable where the folder is not.
    with closed, taken_already, TemporaryFile(dir=folder):
        held = FileLock(os.path.join(folder, ".lock")).acquire(timeout=LOCK_PATIENCE_SECONDS)
    for log in Path(folder, "logs").glob(f"*.of-{os.environ.get(LAUNCHED)}"):
        log.replace(
            log.with_suffix("")
        )  # until now there may have been a run whose logs have these names
    return held


def train_here(config: Config) -> int:
    """Trains, from the newest checkpoint if there is one, in this process, one of those that the environment describes.

    Ends after the last step, or from the first on saves and ends on Ctrl-C or SIGTERM. Returns the
    exit status: that of shells when stopped by a signal. Raises `UserError` and `RunError`.
    """
    status = 0
    first = int(os.environ.get("RANK", 0)) == 0
    console = set_up_logging(config, visible=first)
    with lock(str(config.job.dump_folder)) if first else nullcontext():
        process = start_process(config)
        with answered(config.comm), workers_told():
            require_same_config(config, process)
            done = on_first(process, lambda: finished_step(config))
            if done is None:
                status = _train(config, process, console)
            else:
                console.print(
                    f"The run in {config.job.dump_folder} is finished (step {done}). To train it further, raise "
                    f"training.steps or epochs; to train anew, choose another job.dump_folder."
                )
            stop_process()
    return status


def _train(config: Config, process: Process, console: Console) -> int:
    started = time.monotonic()
    run = Run(config, process, console)
    built, state, settings, folder = (
        run.built,
        run.state,
        config.checkpoint,
        str(config.job.dump_folder),
    )
    with run.metrics as ending:
        ending.callback(
            lambda: run.loader.close()
        )  # the last one: a stage of the curriculum has its own
        console.print(
            f"[bold]{config.job.name}[/bold]: {built.parameters / 1e6:,.1f} M parameters on {process.world_size} × "
            f"{process.device.type}; {run.total_steps:,} steps of {run.plan.global_batch} × {config.training.seq_len} "
            f"tokens; writing to {folder}"
        )
        if settings.create_seed_checkpoint:  # for runs in any layout to start from
            run.saver.save(
                0, model_tensors(built.model), {"step": 0, "counters": vars(state)}, wait=True
            )
            console.print(f"Seed checkpoint written to {os.path.join(run.saver.folder, 'step-0')}.")
            return 0
        uploads = None
        if settings.hf_upload_enabled:
            from lacuna.train.hub import Uploads  # only here: it is no part of other runs

            uploads = Uploads(run)
            run.after_checkpoint = uploads.after_checkpoint
        if train(run, stop := stop_on_signals()):
            model = os.path.join(folder, "hf")
            for write in run.exports(model):
                write()
            on_first(process, lambda: mark_finished(config, state.step))
            if uploads is not None:
                uploads.after_end(model)
            console.print(
                f"Done: {state.step:,} steps, {state.tokens:,} tokens in {time.monotonic() - started:.0f} s."
            )
            adapted = "adapters merged in float32 and " if config.lora.rank else ""
            written = f"{adapted}written in {settings.export_dtype} (checkpoint.export_dtype)"
            console.print(f"The model: {model}, {written}.", soft_wrap=True, markup=False)
            if process.rank == 0:
                hints = closing_hints(config, run.loader.plan.sources, process)
                console.print(hints, soft_wrap=True, markup=False)
        else:
            kept = "saved after step {}. The same command goes on from there."
            lost = "nothing saved after step {} (checkpoint.enable_checkpoint). The same command starts anew."
            console.print(
                f"Stopped and {(kept if settings.enable_checkpoint else lost).format(state.step)}"
            )
            return 128 + next(
                number for received in gather_objects(process, stop) for number in received
            )
    return 0


def finished_step(config: Config) -> int | None:
    """The step at which the run in this folder came to the end that `config` asks for, or None."""
    path = Path(str(config.job.dump_folder), FINISHED)
    if not path.exists() or goes_back(config):
        return None
    try:
        done, wanted = json.loads(path.read_text()), config.training
        enough = (
            wanted.steps <= done["steps"]
            if wanted.steps is not None
            else wanted.epochs == done["epochs"]
        )
        return done["step"] if enough else None
    except (ValueError, TypeError, KeyError):
        logger.warning("%s is damaged: the run goes on from its newest checkpoint", path)
        return None


def mark_finished(config: Config, step: int) -> None:
    """Notes in the run folder that the run came to its end, which patience may have brought before its last step."""
    path, training = Path(str(config.job.dump_folder), FINISHED), config.training
    note = {"step": step, "steps": max(training.steps or 0, step), "epochs": training.epochs}
    replace_text(path, json.dumps(note))
