"""Starts one process per GPU on this machine and looks after them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from lacuna.config import refuse

POLL_SECONDS = 0.1
# After one process failed, the others cannot go on; they get this long to say why.
GRACE_SECONDS = 5.0
LAUNCHED = "LACUNA_LAUNCHED"
# Statuses of a worker that has said itself what went wrong: in the input (2), or in the run, as likely on every rank.
INPUT_WRONG, RUN_FAILED = 2, 3


def runs_here(gpus: int | None, cpus: int | None) -> int:
    """How many processes to start on this machine: 1 when some other launcher already has.

    Raises `UserError` when more GPUs are asked for than there are.
    """
    adopt_slurm()
    if "RANK" in os.environ:
        return 1
    if cpus is not None:
        return cpus
    import torch

    available = torch.cuda.device_count() if os.environ.get("LACUNA_DEVICE") != "cpu" else 0
    asked = gpus or int(os.environ.get("NGPU", 0))
    wrong = f"--gpus {asked} (or NGPU): this machine has {available or 'no'} usable GPU(s)"
    refuse({f"{wrong}: ask for fewer, or use --cpus {asked} to run on the CPU": asked > available})
    return asked or max(available, 1)


def adopt_slurm() -> None:
    """Translates Slurm's description of this task, if there is one, into torchrun's variables (of this process)."""
    environment = os.environ
    if "RANK" in environment or int(environment.get("SLURM_NTASKS", 1)) < 2 or "SLURM_PROCID" not in environment:
        return
    if "MASTER_ADDR" not in environment:
        command = ["scontrol", "show", "hostnames", environment.get("SLURM_JOB_NODELIST", "")]
        environment["MASTER_ADDR"], *_ = subprocess.check_output(command, text=True).split()
    environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000))
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    environment["LOCAL_WORLD_SIZE"] = environment.get("SLURM_NTASKS_PER_NODE", "1")


def launch(words: list[str], processes: int, folder: str) -> int:
    """Runs `lacuna <words>` in `processes` processes and returns the run's exit status.

    Signals are passed on, and nobody is killed while saving (torch's elastic agent gives a signalled worker 30
    seconds, which is too little for a large checkpoint, and hides its exit status). When a process fails, its status
    is the run's, and the others are stopped. Output of all but the first goes to `<folder>/logs/rank-N.log`.
    """
    logs = [os.path.join(folder, "logs", f"rank-{rank}.log") for rank in range(processes)]
    os.makedirs(os.path.dirname(logs[0]), exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // processes)
    # Standard input is never written to: it ends with us, as `die_with_launcher` notices. Ctrl-C comes once, from us.
    command = [sys.executable, "-m", "lacuna", *words]
    apart = {"stdin": subprocess.PIPE, "start_new_session": True}
    workers = []
    with socket.socket() as reserved:  # bound but not listening: the first rank may listen on it, and nobody gets it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        common = {"OMP_NUM_THREADS": str(threads), **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), LAUNCHED: "1"}
        for rank, log in enumerate(logs):
            output = None if rank == 0 else open(log, "w")  # noqa: SIM115 (the child's from here)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(subprocess.Popen(command, env=common | own, stdout=output, stderr=output, **apart))
        return _look_after(workers, logs)


def _look_after(workers: list[subprocess.Popen], logs: list[str]) -> int:
    """Waits for all ranks; once one failed, stops the others, says which is to blame. Returns the run's exit status."""

    def forward(number: int, _: object) -> None:
        for worker in workers:
            worker.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    first: list[int] = []
    deadline = float("inf")
    while None in (codes := [worker.poll() for worker in workers]) and time.monotonic() < deadline:
        if any(codes) and not first:
            first, deadline = [rank for rank, code in enumerate(codes) if code], time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    failing = {rank: code for rank, code in enumerate(codes) if code}
    if not failing:
        return 0
    for worker in workers:
        worker.kill()
        worker.wait()
    # The others fail because one did: to blame is who was killed, by nobody here, then who says why, then the first.
    first = first or list(failing)
    killed = [rank for rank in first if failing[rank] < 0]
    said = [rank for rank, code in failing.items() if code in (INPUT_WRONG, RUN_FAILED)]
    failed = (killed or said or first)[0]
    code = failing[failed]
    if failed or code < 0:  # else the first rank has said itself what went wrong
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else "failed"
        print(f"lacuna: rank {failed} {how}; all ranks are stopped.", file=sys.stderr)
    if failed and (lines := Path(logs[failed]).read_text().splitlines()):
        print(f"The end of {logs[failed]}:", *lines[-20:], sep="\n", file=sys.stderr)
    return 2 if code == INPUT_WRONG else 1


def die_with_launcher() -> None:
    """Ends this process, at once and without writing, when the launcher that started it is gone."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)  # returns when the launcher's end of the pipe is closed, however it died
        os._exit(1)

    if LAUNCHED in os.environ:
        threading.Thread(target=watch, daemon=True).start()
