"""Starts one process per GPU on this machine and looks after them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from lacuna.config import LAUNCHED, STORE, UserError, make_folder
from lacuna.config.cores import thread_settings
from lacuna.config.orphans import end_with_parent

POLL_SECONDS = 0.1
# After one process failed, the others cannot go on; they get this long to say why.
GRACE_SECONDS = 5.0
# Exit statuses of a worker that has printed what went wrong: the input is wrong; the run failed,
# probably on every rank alike; it waited for another rank in vain.
INPUT_WRONG, RUN_FAILED, GAVE_UP = 2, 3, 4
# Exit statuses of a worker that has saved and stopped because of a signal.
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def processes_to_start(gpus: int | None, cpus: int | None) -> int:
    """How many processes to start on this machine: 1 when some other launcher already has.

    Raises `UserError` when more GPUs are asked for than there are, or no number of them.
    """
    adopt_slurm()
    if "RANK" in os.environ:
        return 1
    if cpus is not None:
        return cpus
    import torch

    available = torch.cuda.device_count() if os.environ.get("LACUNA_DEVICE") != "cpu" else 0
    wanted = os.environ.get("NGPU", "0")
    if not wanted.isdecimal():
        raise UserError(f"NGPU: {wanted!r} is no number of GPUs: set it to one, or unset it.")
    asked = gpus or int(wanted)
    if asked > available:
        raise UserError(
            f"--gpus {asked} (or NGPU): this machine has {available or 'no'} usable GPU(s): ask "
            f"for fewer, or use --cpus {asked} to run on the CPU."
        )
    return asked or max(available, 1)


def adopt_slurm() -> None:
    """Sets torchrun's variables in this process to what Slurm says of its task, if Slurm does."""
    environment = os.environ
    is_one_of_several = int(environment.get("SLURM_NTASKS", 1)) > 1
    if "RANK" in environment or "SLURM_PROCID" not in environment or not is_one_of_several:
        return
    if "MASTER_ADDR" not in environment:
        command = ["scontrol", "show", "hostnames", environment.get("SLURM_JOB_NODELIST", "")]
        environment["MASTER_ADDR"], *_ = subprocess.check_output(command, text=True).split()
    port = 20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000
    environment.setdefault("MASTER_PORT", str(port))
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    environment["LOCAL_WORLD_SIZE"] = environment.get("SLURM_NTASKS_PER_NODE", "1")


def launch(words: list[str], processes: int, folder: str) -> int:
    """Runs `lacuna <words>` in `processes` processes and returns the run's exit status.

    Signals are passed on, and nobody is killed while saving (torch's elastic agent gives a
    signalled worker 30 seconds, which is too little for a large checkpoint, and hides its exit
    status). When a process fails, its status is the run's, and the others are stopped. The output
    of every rank but the first goes to `<folder>/logs/rank-N.log`. That file has a longer name
    until the first rank has made sure that no other run writes to the folder.
    """
    logs = [os.path.join(folder, "logs", f"rank-{rank}.log") for rank in range(processes)]
    make_folder(os.path.dirname(logs[0]))
    # Workers get Ctrl-C once, from this process, and not before they have said how they handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    workers = []
    # At this socket the first rank serves torch's store.
    with socket.create_server(("127.0.0.1", 0), backlog=processes) as store:
        environment = _shared_environment(processes, store)
        for rank, log in enumerate(logs):
            inherited = (store.fileno(),) if rank == 0 else ()
            workers.append(_start_process(words, rank, environment, log, inherited))
    status = _supervise(workers, logs)
    for log in logs:  # under this name they are left by a run that never got the folder
        Path(log + _log_suffix()).unlink(missing_ok=True)
    return status


def _shared_environment(processes: int, store: socket.socket) -> dict[str, str]:
    """The environment that the processes of a run share."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {
        "GLOO_SOCKET_IFNAME": loopback,
        **os.environ,
        **thread_settings(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.getsockname()[1]),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        LAUNCHED: str(os.getpid()),
        STORE: str(store.fileno()),
    }


def _start_process(
    words: list[str], rank: int, environment: dict[str, str], log: str, inherited: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """Starts one process of a run, which inherits the open files in `inherited`.

    Nothing is ever written to its standard input, which closes when this process ends:
    `die_with_launcher` waits for that.
    """
    # The new process keeps this file open.
    output = None if rank == 0 else open(log + _log_suffix(), "w")  # noqa: SIM115
    return subprocess.Popen(
        [sys.executable, "-m", "lacuna", *words],
        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=inherited,
    )


def _supervise(workers: list[subprocess.Popen[bytes]], logs: list[str]) -> int:
    """Waits for all ranks and returns the run's exit status.

    Once a rank has failed, the others are stopped and the rank to blame is named. Signals are
    passed on to all ranks. Ctrl-C after another signal ends them all at once.
    """
    received: list[int] = []
    at_once = signal.getsignal(signal.SIGINT)

    def forward(number: int, frame: FrameType | None) -> None:
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
    codes = [worker.poll() for worker in workers]
    while None in codes and time.monotonic() < deadline:
        if any(codes) and not first:
            first = [rank for rank, code in enumerate(codes) if code]
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
        codes = [worker.poll() for worker in workers]
    running = [rank for rank, code in enumerate(codes) if code is None]
    halted = [rank for rank in running if _is_halted(workers[rank].pid)]
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
    return _report_failure(failing, first, halted, logs)


def _report_failure(
    failing: dict[int, int], first: list[int], halted: list[int], logs: list[str]
) -> int:
    """Prints which rank is to blame for the end of a run, and returns the run's exit status.

    `failing` has the exit status of each rank that failed, `first` the ranks that failed first, and
    `halted` the ranks that somebody has paused.
    """
    # One rank fails, and the others fail because of it. A rank that was paused or killed from
    # outside is blamed before one that has printed a reason.
    killed = [rank for rank in first if failing[rank] < 0]
    said = [rank for rank, code in failing.items() if code in (INPUT_WRONG, RUN_FAILED)]
    broken = [rank for rank in first if failing[rank] != GAVE_UP]
    failed = (halted or killed or said or broken or first)[0]
    code = failing.get(failed, 1)
    if failed in halted:
        halt = f"rank {failed} is halted, as by SIGSTOP, and did not answer"
        print(f"lacuna: {halt}.", file=sys.stderr)
        failed = first[0]  # its log may say more
    # Otherwise the first rank has printed itself what went wrong.
    if failed or code not in (INPUT_WRONG, RUN_FAILED, GAVE_UP):
        how = "failed"
        if failing[failed] == GAVE_UP:
            how = "gave up"
        elif code < 0:
            how = f"was killed by signal {signal.Signals(-code).name}"
        print(f"lacuna: rank {failed} {how}; all ranks are stopped.", file=sys.stderr)
    lines = _log_lines(logs[failed]) if failed else []
    if lines:
        print(f"The end of {logs[failed]}:", *lines[-20:], sep="\n", file=sys.stderr)
    return 2 if code == INPUT_WRONG else 1


def _log_lines(log: str) -> list[str]:
    """The lines of a rank's log, under whichever of its two names it has now."""
    for path in (Path(log + _log_suffix()), Path(log)):
        if path.exists():
            return path.read_text().splitlines()
    return []


def _log_suffix() -> str:
    """The ending of our logs' names while another run may have logs in the same folder."""
    return f".of-{os.getpid()}"


def _is_halted(process: int) -> bool:
    """Whether somebody has paused a process, as by SIGSTOP; false where the system cannot tell."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] in "Tt"


def die_with_launcher() -> None:
    """Ends this process, at once and without writing, when the launcher that started it is gone."""

    def watch() -> None:
        # Returns when the launcher's end of the pipe is closed, however the launcher died.
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    if LAUNCHED in os.environ:
        end_with_parent(int(os.environ[LAUNCHED]))
        threading.Thread(target=watch, daemon=True).start()
