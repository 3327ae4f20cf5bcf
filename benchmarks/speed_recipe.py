r"""How long the recipe for speed takes to the validation loss of the recipe with AdamW.

python benchmarks/speed_recipe.py [--seeds 0 1 2] [--output FOLDER] [--tiny]
                                  [--adamw "FLAGS"] [--muon "FLAGS"] [--limit-seconds N]

Trains `speed_adamw.toml` and `speed_muon.toml` with each seed, in turn, by `lacuna train`. For each
seed the lowest validation loss of AdamW's run is what is to be reached; the time until then, of
steps alone, is compared with the time until the other run's first validation that is as low.
FOLDER then has speed.json with every validation, speed.md with a table and speed.svg with the
curves. A call that is stopped goes on with the next one: runs that have come to their end are not
made again, unless their settings have changed.

  --seeds N ...       seeds, each of which is a pair of runs (default: 0 1 2)
  --output FOLDER     where runs and results go (speed)
  --adamw FLAGS       more flags for AdamW's runs, in quotes, as "--optimizer.lr 2e-3"
  --muon FLAGS        the same for the others
  --limit-seconds N   begin no run after so many seconds, and stop the one that is being made
  --tiny              small models and few steps, so that a CPU makes it: a test, no timing
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from curves import Curve, drawn
from table import line, middle, run_until, tail

from lacuna import recipes
from lacuna.parallel.processes import device_type

RECIPES = ("adamw", "muon")
BASELINE, FAST = RECIPES
COLOURS = {"adamw": "#d9822b", "muon": "#2b6cb0"}
# Nothing but steps and validations: no checkpoints, no samples.
PLAIN = "--checkpoint.enable_checkpoint false --metrics.enable_tensorboard false"
TINY_MODEL = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 4096,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
TINY = (
    "--model.config {model} --training.seq_len 32 --training.batch_size 4 --training.steps 12 "
    "--lr_scheduler.warmup_steps 2 --validation.freq 2 --validation.steps 2 --metrics.log_freq 1 "
    "--data.num_workers 0"
)


def main() -> None:
    given = arguments()
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + given.limit_seconds
    problem = None
    for seed in given.seeds:
        for name in RECIPES:
            problem = problem or make_run(folder, name, seed, flags(given, folder, name), ends)
    records = {name: finished(folder, name, given.seeds) for name in RECIPES}
    pairs = compared(records)
    if pairs:
        write_results(folder, records, pairs)
        print((folder / "speed.md").read_text(), end="")
    if problem:
        sys.exit(problem)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", default="speed")
    parser.add_argument("--adamw", default="")
    parser.add_argument("--muon", default="")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def flags(given: argparse.Namespace, folder: Path, name: str) -> list[str]:
    """What a recipe's runs are told beside their seed and folder."""
    told = PLAIN
    if given.tiny:
        model = folder / "tiny.json"
        model.write_text(json.dumps(TINY_MODEL))
        told = f"{told} {TINY.format(model=shlex.quote(str(model)))}"
    return shlex.split(f"{told} {getattr(given, name)}")


def make_run(folder: Path, name: str, seed: int, told: list[str], ends: float) -> str | None:
    """Trains a recipe with a seed and keeps its record, unless that is there.

    Returns what went wrong, if something did.
    """
    run = folder / f"{name}-{seed}"
    record = folder / f"{name}-{seed}.json"
    settings = [Path(recipes.__path__[0], f"speed_{name}.toml").read_text(), *told]
    if record.exists() and json.loads(record.read_text())["settings"] == settings:
        return None
    if time.monotonic() > ends:
        return f"{run} was not begun in time; the same command goes on from here"
    record.unlink(missing_ok=True)
    shutil.rmtree(run, ignore_errors=True)  # of a run that was stopped
    print(f"{run} …", flush=True)
    count = "--gpus" if device_type() == "cuda" else "--cpus"
    words = [sys.executable, "-m", "lacuna", "train", f"speed_{name}.toml", count, "1"]
    words += ["--job.dump_folder", str(run), "--training.seed", str(seed), *told]
    log = folder / f"{name}-{seed}.log"
    status = run_until(words, ends, log)
    if status is None:
        return f"{run} was stopped; the same command makes it anew"
    if status:
        return f"{run} failed; the end of {log}:\n{tail(log)}"
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    made = {"recipe": name, "seed": seed, "device": device_name(), "settings": settings}
    made |= curve(rows)
    unfinished = record.with_suffix(".part")
    unfinished.write_text(json.dumps(made, indent=1) + "\n")
    os.replace(unfinished, record)
    return None


def device_name() -> str:
    return torch.cuda.get_device_name() if device_type() == "cuda" else "CPU"


def curve(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The validations of a run, each with the seconds that training took until then.

    Validations and the start are not counted. The first step, which compiles, counts as if it had
    been as fast as the others.
    """
    rows = [*rows]
    trained = [row for row in rows if "val_loss" not in row]
    speed = statistics.median(row["tokens_per_second"] for row in trained[1:])
    seconds = 0.0
    tokens = step = 0
    validations = []
    for row in rows:
        if "val_loss" in row:
            if row["step"] != step:
                sys.exit("metrics.log_freq must divide validation.freq, so that times are known")
            validations.append({"step": step, "seconds": seconds, "val_loss": row["val_loss"]})
            continue
        own_speed = speed if row is trained[0] else row["tokens_per_second"]
        seconds += (row["tokens"] - tokens) / own_speed
        tokens, step = row["tokens"], row["step"]
    return {"seconds": seconds, "tokens_per_second": speed, "validations": validations}


def finished(folder: Path, name: str, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The records of a recipe's runs that have come to their end, by seed."""
    files = {seed: folder / f"{name}-{seed}.json" for seed in seeds}
    return {seed: json.loads(file.read_text()) for seed, file in files.items() if file.exists()}


def compared(records: dict[str, dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each seed with both runs: what was to be reached, and when each run had reached it."""
    pairs = []
    for seed, baseline in records[BASELINE].items():
        fast = records[FAST].get(seed)
        if fast is None:
            continue
        best = min(baseline["validations"], key=lambda one: one["val_loss"])
        reached = [one for one in fast["validations"] if one["val_loss"] <= best["val_loss"]]
        pair = {
            "seed": seed,
            "val_loss": best["val_loss"],
            BASELINE: {"step": best["step"], "seconds": best["seconds"]},
            FAST: reached[0] if reached else None,
            "ratio": reached[0]["seconds"] / best["seconds"] if reached else None,
            "lowest": min(one["val_loss"] for one in fast["validations"]),
        }
        pairs.append(pair)
    return pairs


def write_results(
    folder: Path, records: dict[str, dict[int, dict[str, Any]]], pairs: list[dict[str, Any]]
) -> None:
    """Writes the JSON file, the table and the plot."""
    ratios = [pair["ratio"] for pair in pairs]
    result = {
        "device": sorted({one["device"] for runs in records.values() for one in runs.values()}),
        "ratio": middle(ratios) if None not in ratios else None,
        "pairs": pairs,
        "runs": [one for runs in records.values() for one in runs.values()],
    }
    (folder / "speed.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = [
        line(("seed", "AdamW's lowest loss", "step", "s", "Muon: step", "s", "ratio", "lowest")),
        line(["---"] * 8),
    ]
    for pair in pairs:
        baseline, fast = pair[BASELINE], pair[FAST]
        cells = [str(pair["seed"]), f"{pair['val_loss']:.4f}", f"{baseline['step']:,}"]
        cells += [f"{baseline['seconds']:.1f}"]
        if fast:
            cells += [f"{fast['step']:,}", f"{fast['seconds']:.1f}", f"{pair['ratio']:.3f} ×"]
        else:
            cells += ["never", "–", "–"]
        lines.append(line([*cells, f"{pair['lowest']:.4f}"]))
    (folder / "speed.md").write_text("\n".join(lines) + "\n")
    (folder / "speed.svg").write_text(picture(result["runs"], pairs))


def picture(runs: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> str:
    """An SVG of validation losses over the seconds of training, and of what was to be reached."""
    curves = [
        Curve(
            f"speed_{run['recipe']}",
            COLOURS[run["recipe"]],
            [(one["seconds"], one["val_loss"]) for one in run["validations"]],
        )
        for run in runs
    ]
    marks = [pair["val_loss"] for pair in pairs]
    return drawn(curves, "seconds of training", marks, "AdamW's lowest")


if __name__ == "__main__":
    main()
