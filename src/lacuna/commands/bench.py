"""`lacuna bench RUN.toml [--against PEER]`: measures a few steps of a run on this machine.

usage: lacuna bench [RUN.toml] [--section.key value ...] [--gpus N | --cpus N] [--steps N]
                    [--windows N] [--output FOLDER] [--against PEER] [--balanced-experts]

Trains the run of RUN.toml for a few steps in a folder of its own, which is removed again: nothing
is read from or written to job.dump_folder, and nothing is saved, validated, exported or uploaded.
Measured are tokens per second and mfu in windows of steps without a report inside, peak memory by
what holds it, and, in three more steps under torch's profiler, the time of each class of kernels.
Prints it, and writes it to NAME.json and NAME.svg, NAME being job.name; earlier ones are replaced.
The learning rate is constant, and the data are those before any stage of a curriculum.

  --steps N         steps in a window (default: 5)
  --windows N       windows, at least 3 (default: 3); median and spread are over these
  --output FOLDER   where NAME.json and NAME.svg go (default: bench)
  --against PEER    transformers, torchtitan, automodel or fla: then the same model makes the same
                    steps in the trainer of that, in processes of its own, and the ratio is printed
                    (from a clone of the repository, whose folder benchmarks has the peers' drivers)
  --balanced-experts  give every expert of a mixture as many tokens by force, in turn, whatever its
                    routers say: for timings alone, since what is trained so is another model
  --gpus N          processes, one per GPU (default: all GPUs, or $NGPU)
  --cpus N          processes on the CPU instead (default without a GPU: 1)
"""

import json
import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from lacuna.commands.arguments import CommandParser, parse_run
from lacuna.config import LAUNCHED, Config, RunError, UserError
from lacuna.config.errors import require_writable
from lacuna.config.machine import MetricsConfig
from lacuna.launch import launch, processes_to_start

PEERS = ("transformers", "torchtitan", "automodel", "fla")
DRIVERS = Path(__file__).parents[3] / "benchmarks"
LEAST_WINDOWS = 3


def run(words: list[str]) -> int | None:
    """Runs the command; returns the exit status of the processes, if it starts some."""
    parser = CommandParser(prog="lacuna bench", add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--windows", type=int, default=LEAST_WINDOWS)
    parser.add_argument("--output", default="bench")
    parser.add_argument("--against", choices=PEERS)
    parser.add_argument("--balanced-experts", "--balanced_experts", action="store_true")
    parser.add_argument("--hand-over")  # of our own: where a worker leaves what a peer needs
    given, rest = parser.parse_known_args(words)
    options, config = parse_run("bench", str(__doc__), rest)
    _check_words(given)
    processes = processes_to_start(options.gpus, options.cpus)
    if LAUNCHED in os.environ or (processes == 1 and not given.against):
        _measure_here(given, config)
        return None
    if given.against:
        _check_peer(given.against, config, processes)
    with TemporaryDirectory(prefix="lacuna-bench-") as folder:
        own = [*words, "--hand-over", folder] if given.against else words
        status = launch(["bench", *own], processes, folder)
        if status == 0 and given.against:
            _measure_peer(given, config.job.name, config.metrics, folder)
    return status


def _check_words(given: Namespace) -> None:
    """Raises UserError for options that cannot be."""
    if given.steps < 1:
        raise UserError("bench: --steps must be at least 1.")
    if given.windows < LEAST_WINDOWS:
        raise UserError(f"bench: --windows must be at least {LEAST_WINDOWS}: fewer have no spread.")
    if given.balanced_experts and given.against:
        raise UserError(
            "bench: --balanced-experts, --against: the peer's routers would choose experts, and "
            "ours not: drop one of them."
        )
    require_writable(given.output, "bench: --output")


def _check_peer(peer: str, config: Config, processes: int) -> None:
    """Raises UserError where the peer cannot make the run, or its driver is not here."""
    if "RANK" in os.environ:
        raise UserError(
            "bench: --against starts its processes itself: run it without torchrun or Slurm."
        )
    if not (DRIVERS / f"{peer}_steps.py").exists():
        raise UserError(
            f"bench: --against {peer}: its driver is not in this installation. It is in "
            "benchmarks/ of lacuna's repository: run pip install -e . -c constraints.txt in a "
            "clone of that."
        )
    import runpy

    from lacuna.parallel.processes import device_type

    rules = runpy.run_path(str(DRIVERS / "comparable.py"))
    rules["require_comparable"](config, peer, processes, device_type())


def _measure_here(given: Namespace, config: Config) -> None:
    """Measures in this process and those beside it; the first writes and prints."""
    # torch takes seconds to import: not before the words are right
    from lacuna.config.console import set_up_logging
    from lacuna.config.devices import check_device
    from lacuna.data import worker_ends_explained
    from lacuna.parallel.processes import (
        device_type,
        naming_silent_ranks,
        on_first,
        require_same_config,
        start_process,
        stop_process,
    )
    from lacuna.train.bench import describe, measure, measured_config

    is_first = int(os.environ.get("RANK", 0)) == 0
    console = set_up_logging(config.metrics, visible=is_first)
    about = (config, given.steps, given.windows)
    checked = measured_config(*about, folder=gettempdir())
    check_device(checked, device_type())
    process = start_process(config.comm, gettempdir(), config.training.enable_cpu_offload)
    own = TemporaryDirectory(prefix="lacuna-bench-") if is_first else nullcontext("")
    with own as made, naming_silent_ranks(config.comm), worker_ends_explained():
        require_same_config(config, process)
        short = measured_config(*about, folder=on_first(process, lambda: made))
        done, measured = measure(short, process, console, given.balanced_experts)
        if given.hand_over:
            from lacuna.train.peers import hand_over

            hand_over(done, given.hand_over, given.steps)
        stop_process()
    if is_first:
        measured["memory_gib"]["estimated"] = _estimate(done)
        name = config.job.name
        record = describe(done, name, config.model_dump(mode="json"), given.steps)
        record["balanced_experts"] = given.balanced_experts
        _write(given, name, config.metrics, record | {"lacuna": measured})


def _estimate(done: Any) -> dict[str, float]:
    """What `lacuna plan` would say of the memory of the run, in GiB by what holds it."""
    from lacuna.model.build import build_meta_model
    from lacuna.plan.memory import estimate_memory

    layout = done.built.mesh.layout
    device = done.process.device
    model = build_meta_model(done.config, done.tokenizer, layout, device.type, device)
    estimate = estimate_memory(done.config, layout, done.batch, model, device.type)
    return {name: size / 2**30 for name, size in estimate.items()}


def _measure_peer(given: Namespace, name: str, metrics: MetricsConfig, folder: str) -> None:
    """Has the peer make the steps that are described in `folder`, and tells both together.

    Raises `RunError` where it fails.
    """
    import subprocess

    from lacuna.config.cores import thread_settings

    task = json.loads(Path(folder, "task.json").read_text())
    driver = str(DRIVERS / f"{given.against}_steps.py")
    processes = task["processes"]
    started = [sys.executable, driver, folder]
    if processes > 1:
        several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        started = [sys.executable, "-m", *several, driver, folder]
    log = _path(given, name, f"{given.against}.log")
    print(f"{given.against} makes the same steps (log: {log})", file=sys.stderr, flush=True)
    environment = os.environ | thread_settings(processes)
    with open(log, "w") as output:
        ended = subprocess.run(
            started, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    if ended.returncode:
        last = "\n".join(log.read_text().splitlines()[-20:])
        raise RunError(f"bench: {given.against} failed. The end of {log}:\n{last}")
    record = json.loads(_path(given, name, "json").read_text())
    own = record["lacuna"]
    peer = json.loads(Path(folder, "measured.json").read_text())
    speeds = [side["tokens_per_second"]["median"] for side in (own, peer)]
    sizes = [side["memory_gib"]["reserved"] for side in (own, peer)]
    ratio = {"tokens_per_second": speeds[0] / speeds[1], "memory": sizes[0] / sizes[1]}
    record |= {"against": given.against, given.against: peer | {"task": task}, "ratio": ratio}
    _write(given, name, metrics, record)


def _path(given: Namespace, name: str, ending: str) -> Path:
    return Path(given.output, f"{name}.{ending}")


def _write(given: Namespace, name: str, metrics: MetricsConfig, record: dict[str, Any]) -> None:
    """Writes a run's record and its picture, and prints it, unless a peer's is still to come."""
    from lacuna.commands.bench_report import save_picture, show

    path = _path(given, name, "json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    if given.hand_over:
        return
    picture = _path(given, name, "svg")
    save_picture(record, str(picture))
    show(record, metrics)
    print(f"Written to {path} and {picture}.")
