"""One run in this process from start to end: it trains, exports, and tells the user."""

import json
import math
import os
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from lacuna.config import (
    LAUNCHED,
    Config,
    OutageError,
    UserError,
    explained,
    logger,
    make_folder,
)
from lacuna.config.console import set_up_logging
from lacuna.config.devices import check_device
from lacuna.config.machine import CheckpointConfig
from lacuna.config.sections import TrainingConfig
from lacuna.data import worker_ends_explained
from lacuna.data.disk import replace_text
from lacuna.formats.checkpoint import FINISHED, listed_steps, model_tensors
from lacuna.parallel.processes import (
    Process,
    device_type,
    gather_objects,
    naming_silent_ranks,
    on_first,
    require_same_config,
    start_process,
    stop_process,
)
from lacuna.train.exports import exports_of
from lacuna.train.resume import require_same_run, shown_settings
from lacuna.train.setup import Run
from lacuna.train.start import goes_back
from lacuna.train.trainer import train

LOCK_PATIENCE_SECONDS = 10.0


def stop_on_signals() -> list[int]:
    """Makes SIGINT and SIGTERM ask the loop to save and stop; returns the list that they go to.

    A second Ctrl-C does what Ctrl-C did before this call. A thread sees to that, because the main
    thread may be waiting for other ranks, and meanwhile learns of no signals.
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
    """Takes the lock of a run folder until the end of the context, or of the process.

    Raises `UserError` when another run has it. Before that it waits some seconds, in which the
    workers of a killed run can end.
    """
    make_folder(folder)
    wrong = f"job.dump_folder: cannot write to {folder!r}"
    closed = explained(wrong, OSError, mend="choose another folder")
    problem = f"job.dump_folder: another run is writing to {folder!r}"
    taken_already = explained(problem, Timeout, mend="stop it, or choose another folder")
    # A temporary file is tried too: the file of the lock may be writable where the folder is not.
    with closed, taken_already, TemporaryFile(dir=folder):
        held = FileLock(os.path.join(folder, ".lock")).acquire(timeout=LOCK_PATIENCE_SECONDS)
    # Only now can no other run be writing logs: ours get their usual names.
    for log in Path(folder, "logs").glob(f"*.of-{os.environ.get(LAUNCHED)}"):
        log.replace(log.with_suffix(""))
    return held


def train_here(config: Config) -> int:
    """Trains in this process, one of those that the environment describes.

    Goes on from the newest checkpoint if there is one, and ends after the last step. From the first
    step on, Ctrl-C and SIGTERM make it save and end. Returns the exit status; after a signal, it is
    128 plus the signal's number. Raises `UserError` and `RunError`.
    """
    status = 0
    first = int(os.environ.get("RANK", 0)) == 0
    console = set_up_logging(config.metrics, visible=first)
    folder = config.job.dump_folder
    with lock(str(folder)) if first else nullcontext():
        check_device(config, device_type())
        process = start_process(config.comm, str(folder), config.training.enable_cpu_offload)
        with naming_silent_ranks(config.comm), worker_ends_explained():
            require_same_config(config, process)
            done = on_first(
                process, lambda: finished_run(folder, config.checkpoint, config.training)
            )
            if done is None:
                status = _train_and_export(config, process, console)
            else:
                require_same_run(done.get("settings", {}), shown_settings(config.model_dump()))
                console.print(
                    f"The run in {folder} is finished (step {done['step']}). To train "
                    f"it further, raise training.steps or epochs; to train anew, choose another "
                    f"job.dump_folder."
                )
            stop_process()
    return status


def _train_and_export(config: Config, process: Process, console: Console) -> int:
    """Trains and exports. Returns the exit status."""
    started = time.monotonic()
    run = Run(config, process, console)
    folder = config.job.dump_folder
    with run.metrics as ending:
        # Whichever loader is then the run's: each stage of the curriculum has its own.
        ending.callback(lambda: run.loader.close())
        console.print(
            f"[bold]{config.job.name}[/bold]: {run.built.parameters / 1e6:,.1f} M parameters on "
            f"{process.world_size} × {process.device.type}; {run.total_steps:,} steps of "
            f"{run.batch.global_batch} × {config.training.seq_len} tokens; writing to {folder}"
        )
        if config.checkpoint.create_seed_checkpoint:  # for runs in any layout to start from
            with run.halves.joined():
                tensors = model_tensors(run.built.model)
                run.saver.save(0, tensors, {"loop": run.loop_state()}, wait=True)
            console.print(f"Seed checkpoint written to {os.path.join(run.saver.folder, 'step-0')}.")
            return 0
        uploads = None
        if config.checkpoint.hf_upload_enabled:
            from lacuna.train.hub import Uploads  # an extension

            uploads = Uploads(run)
            run.after_checkpoint = uploads.after_checkpoint
        stop = stop_on_signals()
        is_saved = config.checkpoint.enable_checkpoint
        try:
            ended = train(run, stop)
        except OutageError as error:
            told = _about_stopping(is_saved, run.state.step, error.way_on)
            raise type(error)(f"{error} {told}") from error
        if not ended:
            console.print(_about_stopping(is_saved, run.state.step))
            received = [number for numbers in gather_objects(process, stop) for number in numbers]
            return 128 + int(received[0])
        model = os.path.join(folder, "hf")
        for write in exports_of(run, model):
            write()
        on_first(process, lambda: mark_finished(run))
        if uploads is not None:
            uploads.after_end(model)
        _say_done(run, console, model, time.monotonic() - started)
    return 0


def _about_stopping(is_saved: bool, step: int, way_on: str = OutageError.way_on) -> str:
    """The message about a run that is stopped after `step`, and what goes on from there."""
    if step == 0:
        return "Stopped before the first step was done. The same command starts anew."
    if is_saved:
        return f"Stopped and saved after step {step}. {way_on}"
    return (
        f"Stopped and nothing saved after step {step} (checkpoint.enable_checkpoint). The same "
        f"command starts anew."
    )


def _say_done(run: Run, console: Console, model: str, seconds: float) -> None:
    """Prints what a run that came to its end has done, and what can be done with the `model`."""
    config = run.config
    steps = f"{run.state.step:,} steps, {run.state.tokens:,} tokens"
    console.print(f"Done: {steps} in {seconds:.0f} s.")
    adapted = "adapters merged in float32 and " if config.lora.rank else ""
    written = f"{adapted}written in {config.checkpoint.export_dtype} (checkpoint.export_dtype)"
    console.print(f"The model: {model}, {written}.", soft_wrap=True, markup=False)
    if run.process.rank == 0:
        from lacuna.train.hints import closing_hints  # an extension

        is_early = run.state.worse_validations >= (config.validation.patience or math.inf)
        hints = closing_hints(config, run.loader.plan.sources, run.process, is_early)
        console.print(hints, soft_wrap=True, markup=False)


def finished_run(
    folder: str, settings: CheckpointConfig, wanted: TrainingConfig
) -> dict[str, Any] | None:
    """What was noted when the run came to the end that is asked for now; None if it has not.

    Raises `UserError` where it came to another end and left no checkpoint: another model would be
    trained from the beginning, and take the place of the one in the folder.
    """
    path = Path(folder, FINISHED)
    if not path.exists() or goes_back(folder, settings.load_step):
        return None
    try:
        done: dict[str, Any] = json.loads(path.read_text())
        is_enough = (
            wanted.epochs == done["epochs"]
            if wanted.steps is None
            else wanted.steps <= done["steps"]
        )
        done["step"] = int(done["step"])
    except (ValueError, TypeError, KeyError):
        logger.warning("%s is damaged: the run goes on from its newest checkpoint", path)
        return None
    checkpoints = os.path.join(folder, settings.folder)
    if not is_enough and not (settings.enable_checkpoint and listed_steps(checkpoints)):
        raise UserError(
            f"job.dump_folder: the run in {folder} is finished (step {done['step']}), and there is "
            "no checkpoint to go on from (checkpoint.enable_checkpoint): choose another folder; to "
            f"train its model further, set model.name_or_path = {os.path.join(folder, 'hf')!r}."
        )
    return done if is_enough else None


def mark_finished(run: Run) -> None:
    """Notes in the run's folder that the run came to its end, maybe before its last step."""
    training = run.config.training
    step = run.state.step
    note = {"step": step, "steps": max(training.steps or 0, step), "epochs": training.epochs}
    text = json.dumps(note | {"settings": run.started_with["settings"]})
    replace_text(Path(run.config.job.dump_folder, FINISHED), text)
