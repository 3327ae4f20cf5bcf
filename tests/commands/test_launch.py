"""Processes may be started by lacuna itself, by torchrun or by Slurm; the run is the same."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lacuna.launch import _report_failure
from runs import (
    curve,
    ended,
    environment,
    processes_naming,
    refused,
    rows,
    start,
    start_anew,
    together,
    train,
    wait_until,
    weights,
)


def torchrun(world: Path, folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "lacuna",
        "train",
        str(world / "run.toml"),
        "--job.dump_folder",
        str(folder),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Done: 8 steps") == 1


def free_job_number() -> int:
    """A Slurm job's number whose port, 20000 and the number, is free."""
    while True:
        number = random.randrange(10_000)
        with socket.socket() as listener:
            if listener.connect_ex(("127.0.0.1", 20_000 + number)):
                return number


def slurm(world: Path, folder: Path) -> None:
    common = {
        "SLURM_JOB_ID": str(free_job_number()),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    tasks = [
        start(
            "train",
            world / "run.toml",
            "--job.dump_folder",
            folder,
            env=environment(SLURM_PROCID=str(task), SLURM_LOCALID=str(task), **common),
        )
        for task in range(2)
    ]
    outputs = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert "on 2 × cpu" in outputs[0]
    assert outputs[1] == ""


@pytest.fixture(scope="module")
def launched(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    together(
        lambda: train(world, folder / "lacuna", "--cpus", 2),
        lambda: torchrun(world, folder / "torchrun"),
        lambda: slurm(world, folder / "slurm"),
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_other_launchers_make_the_same_run(launcher: str, launched: Path) -> None:
    keys = ("loss", "grad_norm", "tokens")
    assert curve(launched / launcher, *keys) == curve(launched / "lacuna", *keys)
    assert curve(launched / launcher, *keys)[-1][-1] == 8 * 2 * 4 * 32
    assert weights(launched / launcher) == weights(launched / "lacuna")


@pytest.mark.slow
def test_other_ranks_report_nothing_unless_asked(launched: Path) -> None:
    assert not list((launched / "lacuna").glob("metrics-rank-*"))
    assert [path.name for path in (launched / "lacuna" / "logs").iterdir()] == ["rank-1.log"]
    assert (launched / "lacuna" / "logs" / "rank-1.log").read_text() == ""


def listening(process: int) -> set[str]:
    """The addresses, in the kernel's hexadecimal, at which a process takes connections."""
    sockets = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(entry))
    table = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return {
        row[1].split(":")[0] for row in table if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }


@pytest.mark.slow
def test_ranks_on_one_machine_listen_to_nobody_else(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ("--cpus", 2, "--training.steps", 100_000)
    with ended(
        start_anew("train", world / "run.toml", "--job.dump_folder", folder, *flags)
    ) as process:
        wait_until(lambda: len(rows(folder)) > 1, process)
        ranks = processes_naming(str(folder))
        addresses = set().union(*map(listening, ranks))
    assert len(ranks) == 3
    assert addresses == {"0100007F"}, "127.0.0.1"


def test_a_number_of_gpus_that_is_none_is_refused(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NGPU", "all")
    assert "NGPU: 'all' is no number of GPUs" in refused("train", world / "run.toml", "--dry-run")


@pytest.mark.parametrize(
    ("status", "said"), [(5, "rank 0 failed"), (-9, "rank 0 was killed by signal SIGKILL"), (3, "")]
)
def test_the_first_rank_is_blamed_unless_it_has_said_why(
    status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [str(tmp_path / f"rank-{rank}.log") for rank in range(2)]
    assert _report_failure({0: status, 1: 4}, [0], [], logs) == 1
    wanted = f"lacuna: {said}; all ranks are stopped.\n" if said else ""
    assert capsys.readouterr().err == wanted
