"""How many processor cores this process may use, and how libraries are kept to that number."""

import math
import os
from pathlib import Path

# Variables from which libraries take their number of threads, or of processes that compile, when
# they are first imported.
_THREADS = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
_GIVEN = dict(os.environ)  # the environment before lacuna adds anything to it


def usable_cores() -> int:
    """How many cores this process may use.

    Those are the cores that it is bound to, or fewer where its container's quota is less.
    """
    bound = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        bound = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(bound, quota())))


def quota(memberships: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float:
    """How many cores' worth of time control groups grant this process; infinite without a limit.

    Groups of version 1 and 2 are understood. The smallest quota among the process's group and the
    groups that hold it counts. Within a container the group's path is often that of the host while
    the group itself is mounted at the root, so the root is looked at too.
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
            limits += [_quota_of(group) for group in groups]
    return min(limits)


def _quota_of(group: Path) -> float:
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
    """Environment variables that keep each of `processes` to its share of the cores.

    Variables that were set when this process was started keep their values.
    """
    cores = str(max(1, usable_cores() // processes))
    settings = dict.fromkeys(_THREADS, cores)
    # A waiting thread that spins takes the time of the one that it waits for.
    settings["OMP_WAIT_POLICY"] = "passive"
    # Parallel tokenizers complain when the data workers are forked.
    settings["TOKENIZERS_PARALLELISM"] = "false"
    return {name: _GIVEN.get(name, value) for name, value in settings.items()}
