"""How many processor cores there are for this process, and libraries told to use no more."""

import math
import os
from pathlib import Path

# What each library of ours reads, when it is first imported, for its number of threads (or
# processes that compile).
_THREADS = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
_GIVEN = dict(os.environ)  # by whoever started this process, before anything of ours is added


def usable_cores() -> int:
    """The cores that this process may use: those it is bound to, or fewer where its container's quota is less."""
    bound = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, math.ceil(min(bound, quota())))


def quota(memberships: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float:
    """The cores' worth of time that control groups, of version 1 or 2, grant this process; infinite without a limit.

    The least of its group and all that hold it counts. Within a container the group's path is often
    that of the host, and what is mounted is the group itself: hence the root too.
    """
    try:
        lines = Path(memberships).read_text().splitlines()
    except OSError:  # no Linux
        return math.inf
    limits = [math.inf]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ("cpu", "cpu,cpuacct", controllers) if controllers else ("", "unified")
        inner = [part for part in path.split("/") if part]
        for mount in mounts:
            groups = (Path(root, mount, *inner[:depth]) for depth in range(len(inner) + 1))
            limits += [_limit(group) for group in groups]
    return min(limits)


def _limit(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            allowed, period = (group / "cpu.max").read_text().split()
        else:
            allowed = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text()
    except (OSError, ValueError):  # not there, or not for us to read
        return math.inf
    return math.inf if allowed in ("max", "-1") else int(allowed) / int(period)


def thread_settings(processes: int = 1) -> dict[str, str]:
    """The environment of each of so many processes that share the cores; what was given from outside stands.

    Threads that wait for others sleep: beside other work, spinning takes the time from the one that
    is waited for.
    """
    cores = str(max(1, usable_cores() // processes))
    return {name: _GIVEN.get(name, cores) for name in _THREADS} | {
        "OMP_WAIT_POLICY": _GIVEN.get("OMP_WAIT_POLICY", "passive"),
        "TOKENIZERS_PARALLELISM": _GIVEN.get(
            "TOKENIZERS_PARALLELISM", "false"
        ),  # which forks, and would complain
    }
