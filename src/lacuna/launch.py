"""Starts one process per GPU on this machine and looks after them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from lacuna.config import LAUNCHED, STORE, make_folder, refuse
from lacuna.config.cores import thread_settings
from lacuna.config.orphans import end_with

POLL_SECONDS = 0.1
# After one process failed, the others cannot go on; they get this long to say why.
GRACE_SECONDS = 5.0
# Statuses of a worker that has said itself what went wrong: in the input (2), or in the run, as
# likely on every rank, or that it waited for another one in vain.
INPUT_WRONG, RUN_FAILED, GAVE_UP = 2, 3, 4
# Statuses of a worker that has saved and stopped because of a signal.
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


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
    if (
        "RANK" in environment
        or int(environment.get("SLURM_NTASKS", 1)) < 2
        or "SLURM_PROCID" not in environment
    ):
        return
    if "MASTER_ADDR" not in environment:
        command = ["scontrol", "show", "hostnames", environment.get("SLURM_JOB_NODELIST", "")]
        environment["MASTER_ADDR"], *_ = subprocess.check_output(command, text=True).split()
    environment.setdefault(
        "MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000)
    )
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    environment["LOCAL_WORLD_SIZE"] = environment.get("SLURM_NTASKS_PER_NODE", "1")


def launch(words: list[str], processes: int, folder: str) -> int:
    """Runs `lacuna <words>` in `processes` processes and returns the run's exit status.

    Signals are passed on, and nobody is killed while saving (torch's elastic agent gives a
    signalled worker 30 seconds, which is too little for a large checkpoint, and hides its exit
    status). When a process fails, its status is the run's, and the others are stopped. Output of
    all but the first goes to `<folder>/logs/rank-N.log`, which has a longer name until the first
    has made sure that no other run writes to the folder.
    """
    logs = [os.path.join(folder, "logs", f"rank-{rank}.log") for rank in range(processes)]
    make_folder(os.path.dirname(logs[0]))
    ours = _own_ending()
    # Standard input is never written to: it ends with us, as `die_with_launcher` notices. Ctrl-C
    # comes once, from us, and not before a worker has said what it does then.
    command = [sys.executable, "-m", "lacuna", *words]
    apart = {"stdin": subprocess.PIPE, "start_new_session": True}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    workers = []
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    with socket.create_server(
        ("127.0.0.1", 0), backlog=processes
    ) as store:  # where the first rank keeps torch's store
        port, number = store.getsockname()[1], store.fileno()
        common = (
            os.environ
            | thread_settings(processes)
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        )
        common |= {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            LAUNCHED: str(os.getpid()),
        }
        common |= {
            STORE: str(number),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        }
        for rank, log in enumerate(logs):
            output = None if rank == 0 else open(log + ours, "w")  # noqa: SIM115 (the child's from here)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            apart["pass_fds"] = () if rank else (number,)
            workers.append(
                subprocess.Popen(command, env=common | own, stdout=output, stderr=output, **apart)
            )
    status = _look_after(workers, logs)
    for log in logs:
        Path(log + ours).unlink(
            missing_ok=True
        )  # of a run that was refused before it had the folder
    return status


def _look_after(workers: list[subprocess.Popen], logs: list[str]) -> int:
    """Waits for all ranks; once one failed, stops the others, says which is to blame. Returns the run's exit status.

    Signals are passed on; Ctrl-C after another one ends all at once.
    """
    received: list[int] = []
    at_once = signal.getsignal(signal.SIGINT)

    def forward(number: int, frame: object) -> None:
        if received and number == signal.SIGINT and callable(at_once):
            for worker in workers:
                worker.kill()
            at_once(number, frame)
        received.append(number)
        for worker in workers:
            worker.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    first: list[int] = []
    deadline = float("inf")
    while None in (codes := [worker.poll() for worker in workers]) and time.monotonic() < deadline:
        if any(codes) and not first:
            first, deadline = (
                [rank for rank, code in enumerate(codes) if code],
                time.monotonic() + GRACE_SECONDS,
            )
        time.sleep(POLL_SECONDS)
    halted = [
        rank for rank, code in enumerate(codes) if code is None and _is_halted(workers[rank].pid)
    ]
    for worker in workers:
        worker.kill()
        worker.wait()
    failing = {rank: code for rank, code in enumerate(codes) if code and code not in STOPPED}
    if not failing:
        return max(code or 0 for code in codes)
    by_signal = {-received[0], 128 + received[0]} if received else set()
    if by_signal & {*codes} and {*failing.values()} <= by_signal | {GAVE_UP}:
        return 128 + received[0]
    first = [rank for rank in first if rank in failing] or list(failing)
    return _blame(failing, first, halted, logs)


def _blame(failing: dict[int, int], first: list[int], halted: list[int], logs: list[str]) -> int:
    """Says which rank is to blame, of those that are `failing`, `first` or later, and of those that are halted.

    Returns the run's exit status.
    """
    # The others fail because one did: to blame is who was halted or killed, by nobody here, then
    # who says why.
    killed = [rank for rank in first if failing[rank] < 0]
    said = [rank for rank, code in failing.items() if code in (INPUT_WRONG, RUN_FAILED)]
    broken = [rank for rank in first if failing[rank] != GAVE_UP]
    failed = (halted or killed or said or broken or first)[0]
    code = failing.get(failed, 1)
    if failed in halted:
        print(
            f"lacuna: rank {failed} is halted, as by SIGSTOP, and did not answer.", file=sys.stderr
        )
        failed = first[0]  # which may know more
    if failed or code < 0:  # else the first rank has said itself what went wrong
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else "failed"
        how = "gave up" if failing[failed] == GAVE_UP else how
        print(f"lacuna: rank {failed} {how}; all ranks are stopped.", file=sys.stderr)
    if failed and (lines := _written(logs[failed])):
        print(f"The end of {logs[failed]}:", *lines[-20:], sep="\n", file=sys.stderr)
    return 2 if code == INPUT_WRONG else 1


def _written(log: str) -> list[str]:
    """The lines of a rank's log, under the name that it has by now."""
    return next(
        (
            path.read_text().splitlines()
            for path in (Path(log + _own_ending()), Path(log))
            if path.exists()
        ),
        [],
    )


def _own_ending() -> str:
    """How the names of our workers' logs end while another run may have logs in the same folder."""
    return f".of-{os.getpid()}"


def _is_halted(process: int) -> bool:
    """Whether somebody has stopped a process without ending it (where the system can tell)."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] in "Tt"


def die_with_launcher() -> None:
    """Ends this process, at once and without writing, when the launcher that started it is gone."""

    def watch() -> None:
        os.read(
            sys.stdin.fileno(), 1
        )  # returns when the launcher's end of the pipe is closed, however it died
        os._exit(1)

    if LAUNCHED in os.environ:
        end_with(int(os.environ[LAUNCHED]))
        threading.Thread(target=watch, daemon=True).start()
