r"""Measures rows of a table of benchmarks on this machine, each beside its peer.

python benchmarks/table.py [ROW ...] [--repeats 3] [--limit-seconds 540] [--output FOLDER] [--tiny]

Every repeat is one `lacuna bench`: our steps, then the peer's, so that both take turns. A row is
printed as soon as it is there, and all of them stand in FOLDER/table.json and FOLDER/table.md, with
those of earlier calls. Models are made in place with random weights; the text is Python's own
library. Without ROW all rows that fit the GPUs here; `--list` names them.

  --repeats N         how often a row is measured (default: 3)
  --limit-seconds N   time of a row, after which it is stopped; what it measured counts (540)
  --steps N           steps in a window (5)
  --output FOLDER     where the table goes (bench)
  --list              print the rows and their settings instead
  --tiny              shrink every row, so that a CPU makes it: a test of the rows, no timing
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from row_conversations import write_conversations
from rows import ROWS, Row, toml

from lacuna.parallel.processes import device_type

COLUMNS = (
    "row",
    "tokens/s",
    "peer",
    "its tokens/s",
    "ratio (lowest to highest)",
    "GiB",
    "its GiB",
    "memory",
    "MFU",
    "repeats",
)


def main() -> None:
    given = arguments()
    names = given.rows or [name for name, row in ROWS.items() if given.tiny or row.fits()]
    if given.list:
        print(
            "\n\n".join(f"# {name}: {ROWS[name].about}\n{toml(ROWS[name], '.')}" for name in names)
        )
        return
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "table.json"
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    print(line(COLUMNS), line(["---"] * len(COLUMNS)), sep="\n", flush=True)
    failed = []
    for name in names:
        row = ROWS[name].shrunk() if given.tiny else ROWS[name]
        runs, problem = measured(name, row, given)
        if problem:
            print(f"{name}: {problem}", file=sys.stderr, flush=True)
            failed.append(name)
        if not runs:
            continue
        table[name] = summary(name, row, runs)
        path.write_text(json.dumps(table, indent=2) + "\n")
        shown = [
            line(COLUMNS),
            line(["---"] * len(COLUMNS)),
            *(told(one) for one in table.values()),
        ]
        Path(folder, "table.md").write_text("\n".join(shown) + "\n")
        print(told(table[name]), flush=True)
    sys.exit(1 if failed else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-seconds", type=float, default=540)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--output", default="bench")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    unknown = [name for name in given.rows if name not in ROWS]
    if unknown:
        parser.error(f"no such rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    given.steps = given.steps or (1 if given.tiny else 5)
    return given


def measured(
    name: str, row: Row, given: argparse.Namespace
) -> tuple[list[dict[str, Any]], str | None]:
    """The records of a row's repeats, and what went wrong, if something did."""
    runs: list[dict[str, Any]] = []
    ends = time.monotonic() + given.limit_seconds
    with TemporaryDirectory(prefix="lacuna-table-") as folder:
        row.write_model(folder)
        if row.conversations:
            write_conversations(folder, 64 if given.tiny else 4096)
        file = Path(folder, f"{name}.toml")
        file.write_text(toml(row, folder))
        count = "--gpus" if device_type() == "cuda" else "--cpus"
        words = [sys.executable, "-m", "lacuna", "bench", str(file), count, str(row.processes)]
        words += ["--steps", str(given.steps), "--output", folder, "--job.name", name]
        words += ["--against", row.against] if row.against else []
        log = Path(given.output, f"{name}.log")
        for repeat in range(given.repeats):
            status = run_until(words, ends, log)
            if status != 0:
                keep_what_is_left(folder, name, given.output)
            if status is None:
                return runs, f"stopped after {given.limit_seconds:g} s, in repeat {repeat + 1}"
            if status:
                return runs, f"failed in repeat {repeat + 1}; the end of {log}:\n{tail(log)}"
            runs.append(json.loads(Path(folder, f"{name}.json").read_text()))
    return runs, None


def keep_what_is_left(folder: str, name: str, output: str) -> None:
    """Copies what a repeat that did not end well has written: our record, and the peer's log."""
    for file in Path(folder).glob(f"{name}.*"):
        if file.suffix in (".json", ".log"):
            shutil.copy(file, Path(output, f"left-{file.name}"))


def run_until(words: list[str], ends: float, log: Path) -> int | None:
    """Runs a command with its output in `log`; its exit status, or None if it took too long."""
    with open(log, "w") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that its workers can be ended with it
        )
        try:
            return process.wait(max(ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return None


def tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-12:])


def summary(name: str, row: Row, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a row over its repeats, and all that was measured."""
    device = runs[0]["device"]
    result: dict[str, Any] = {
        "row": name,
        "about": row.about,
        "device": f"{device['processes']} × {device['name']}",
        "peer": row.against,
        "tokens_per_second": middle([run["lacuna"]["tokens_per_second"]["median"] for run in runs]),
        "reserved_gib": middle([run["lacuna"]["memory_gib"]["reserved"] for run in runs]),
        "mfu": None,
        "runs": runs,
    }
    if all(run["lacuna"]["mfu"] for run in runs):
        result["mfu"] = middle([run["lacuna"]["mfu"]["median"] for run in runs])
    if row.against:
        peers = [run[row.against] for run in runs]
        result |= {
            "peer_tokens_per_second": middle(
                [peer["tokens_per_second"]["median"] for peer in peers]
            ),
            "peer_reserved_gib": middle([peer["memory_gib"]["reserved"] for peer in peers]),
            "speed_ratio": middle([run["ratio"]["tokens_per_second"] for run in runs]),
            "memory_ratio": middle([run["ratio"]["memory"] for run in runs]),
        }
    return result


def middle(values: list[float]) -> dict[str, float]:
    """The median of the repeats, and their range."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def told(row: dict[str, Any]) -> str:
    """A row of the table in Markdown."""
    cells = [row["row"], f"{row['tokens_per_second']['median']:,.0f}"]
    if row["peer"]:
        ratio = row["speed_ratio"]
        cells += [row["peer"], f"{row['peer_tokens_per_second']['median']:,.0f}"]
        cells += [f"{ratio['median']:.3f} × ({ratio['lowest']:.3f} to {ratio['highest']:.3f})"]
    else:
        cells += ["–"] * 3
    cells += [f"{row['reserved_gib']['median']:.2f}"]
    if row["peer"]:
        cells += [f"{row['peer_reserved_gib']['median']:.2f}"]
        cells += [f"{row['memory_ratio']['median']:.3f} ×"]
    else:
        cells += ["–"] * 2
    cells += [f"{row['mfu']['median']:.1%}" if row["mfu"] else "–", str(len(row["runs"]))]
    return line(cells)


def line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
