"""A process has as many threads as cores: by affinity, by its container's quota, or as given."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lacuna.config.cores import quota, usable_cores
from runs import environment

SAID = (
    "import os, sys; from lacuna.cli import main; main(['--version']); import torch; "
    "print(torch.get_num_threads(), os.environ['RAYON_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])"
)


def faked(folder: Path, memberships: str, files: dict[str, str]) -> float:
    """The quota where /proc/self/cgroup and the files of /sys/fs/cgroup are these."""
    root = folder / "groups"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    (folder / "memberships").write_text(memberships + "\n")
    return quota(str(folder / "memberships"), str(root))


@pytest.mark.parametrize(
    ("memberships", "files", "cores"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2),  # a container, version 2
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/user/run", {"user/cpu.max": "150000 100000", "user/run/cpu.max": "max 100000"}, 1.5),
        ("0::/../host", {"cpu.max": "50000 100000"}, 0.5),
        (
            "3:cpu,cpuacct:/docker/a",
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3,
        ),
        (
            "3:cpuset:/\n1:cpu:/job\n0::/",
            {
                "cpu/job/cpu.cfs_quota_us": "20000",
                "cpu/job/cpu.cfs_period_us": "10000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ("7:cpuset:/", {"cpuset/cpu.cfs_quota_us": "1", "cpuset/cpu.cfs_period_us": "1"}, math.inf),
        ("0::/", {"cpu.max": "broken"}, math.inf),
        ("nothing", {}, math.inf),
    ],
)
def test_the_quota_is_the_least_of_the_groups(
    tmp_path: Path, memberships: str, files: dict[str, str], cores: float
) -> None:
    assert faked(tmp_path, memberships, files) == cores


def test_without_control_groups_affinity_alone_counts(tmp_path: Path) -> None:
    assert quota(str(tmp_path / "nowhere")) == math.inf
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def threads(*around: str, **given: str) -> list[str]:
    """Starts a process of ours; returns torch's threads, the tokenizers', and how they wait."""
    kept = {
        name: value
        for name, value in environment().items()
        if "THREADS" not in name and "OMP" not in name
    }
    done = subprocess.run(
        [*around, sys.executable, "-c", SAID], env=kept | given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.slow
def test_torch_and_tokenizers_take_the_cores_that_a_process_is_bound_to() -> None:
    one = str(min(os.sched_getaffinity(0)))
    assert threads("taskset", "-c", one) == ["1", "1", "passive"]
    every = str(usable_cores())
    assert threads() == [every, every, "passive"]


@pytest.mark.slow
def test_ranks_share_the_cores_and_what_is_given_stands() -> None:
    assert threads(LOCAL_WORLD_SIZE="1000")[:2] == ["1", "1"]
    given = threads(
        "taskset",
        "-c",
        str(min(os.sched_getaffinity(0))),
        OMP_NUM_THREADS="2",
        OMP_WAIT_POLICY="active",
    )
    assert given == ["2", "1", "active"]
