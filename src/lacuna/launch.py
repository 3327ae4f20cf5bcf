"""Starts one process per GPU on this machine and looks after them."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from lacuna.config import UserError

POLL_SECONDS = 0.1
# After one process failed, the others cannot go on; they get this long to say why.
GRACE_SECONDS = 5.0
LAUNCHER = "LACUNA_LAUNCHER_PID"
# Statuses of a worker that has said itself what went wrong: in the input (2), or in the run, as likely on every rank.
INPUT_WRONG, RUN_FAILED = 2, 3


def runs_here(gpus: int | None, cpus: int | None) -> int:
    """How many processes to start on this machine: 1 when some other launcher already has.

    Raises `UserError` when more GPUs are asked for than there are.
    """
    if adopt_slurm() or "RANK" in os.environ:
        return 1
    if cpus is not None:
        return cpus
    import torch

    available = torch.cuda.device_count() if os.environ.get("LACUNA_DEVICE") != "cpu" else 0
    wanted = gpus if gpus is not None else int(os.environ.get("NGPU", 0)) or None
    if wanted is None:
        return max(available, 1)
    if available == 0 and gpus is not None:
        raise UserError(f"--gpus {gpus}: this machine has no usable GPU: use --cpus {gpus} to run on the CPU.")
    if wanted > max(available, 1):
        raise UserError(f"{wanted} GPUs are asked for (--gpus or NGPU), but this machine has {available}.")
    return wanted


def adopt_slurm() -> bool:
    """Translates Slurm's description of this task, if there is one, into torchrun's variables (of this process)."""
    environment = os.environ
    if "RANK" in environment or int(environment.get("SLURM_NTASKS", 1)) < 2 or "SLURM_PROCID" not in environment:
        return False
    hosts = environment.get("SLURM_JOB_NODELIST", "")
    if "MASTER_ADDR" not in environment:
        listed = subprocess.run(["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=True)
        environment["MASTER_ADDR"] = listed.stdout.split()[0]
    environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000))
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    environment["LOCAL_WORLD_SIZE"] = environment.get("SLURM_NTASKS_PER_NODE", "1")
    return True


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(words: Sequence[str], processes: int, folder: str) -> int:
    """Runs `lacuna <words>` in `processes` processes and returns the run's exit status.

    Signals are passed on, and nobody is killed while saving (torch's elastic agent gives a signalled worker 30
    seconds, which is too little for a large checkpoint, and hides its exit status). When a process fails, its status
    is the run's, and the others are stopped. Output of all but the first goes to `<folder>/logs/rank-N.log`.
    """
    logs = os.path.join(folder, "logs")
    os.makedirs(logs, exist_ok=True)
    port = _free_port()
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    workers = []
    for rank in range(processes):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": threads, LAUNCHER: str(os.getpid()),
        }  # fmt: skip
        output = None if rank == 0 else open(_log_path(logs, rank), "w")  # noqa: SIM115 (the child's from here)
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "lacuna", *words],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C comes once, from us
            )  # fmt: skip
        )
    return _look_after(workers, logs)


def _log_path(logs: str, rank: int) -> str:
    return os.path.join(logs, f"rank-{rank}.log")


def _look_after(workers: list[subprocess.Popen], logs: str) -> int:
    def forward(number: int, frame: FrameType | None) -> None:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            codes = [worker.poll() for worker in workers]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                return _stop_after_failure(workers, failed, logs)
            if all(code == 0 for code in codes):
                return 0
            time.sleep(POLL_SECONDS)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop_after_failure(workers: list[subprocess.Popen], first: list[int], logs: str) -> int:
    """Stops all ranks after the `first` failed, says which one is to blame, and returns the run's exit status."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(POLL_SECONDS)
    codes = [worker.poll() or 0 for worker in workers]
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
    # The others fail because one did: who says why is to blame first, then who failed first, then who was killed.
    failing = [rank for rank, code in enumerate(codes) if code]
    said = [rank for rank in failing if codes[rank] in (INPUT_WRONG, RUN_FAILED)]
    failed = said[0] if said else min(failing, key=lambda rank: (rank not in first, codes[rank] > 0))
    code = codes[failed]
    if failed or code < 0:  # else the first rank has said itself what went wrong
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else "failed"
        print(f"lacuna: rank {failed} {how}; all ranks are stopped.", file=sys.stderr)
        path = _log_path(logs, failed)
        if failed and os.path.exists(path):
            with open(path) as file:
                end = "".join(file.readlines()[-20:])
            if end:
                print(f"The end of {path}:\n{end}", file=sys.stderr)
    return 2 if code == INPUT_WRONG else 1


def die_with_launcher() -> None:
    """Ends this process, at once and without writing, when the launcher that started it is gone."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):
        os._exit(1)

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os._exit(1)

    if sys.platform != "linux":
        threading.Thread(target=watch, daemon=True).start()
