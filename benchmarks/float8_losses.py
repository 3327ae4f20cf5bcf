r"""Does float8 learn what bfloat16 does? The same run in both, beside another seed of bfloat16.

python benchmarks/float8_losses.py [--steps 1000] [--seeds 0 1] [--output FOLDER] [--experts]
                                  [--tiny]

Trains a Llama of 8 layers and 1,024 wide from scratch on the Python standard library: in bfloat16
with every seed, and with the first seed in each recipe of float8, all of its layers (not only those
that gain by it). With --experts it is a Mixtral, of which a token visits two of eight experts of
half the width, and they are in float8 as well. FOLDER then has float8.json, float8.md with a table,
and float8.svg with the held-out losses. All runs are made at once, on one GPU: times mean nothing
here.

  --steps N       steps of 16 rows of 1,024 tokens (1000)
  --seeds N ...   seeds of bfloat16 (default: 0 1)
  --output FOLDER where runs and results go (float8)
  --experts       a mixture of experts
  --tiny          a tiny model and few steps, so that a CPU makes it: a test, no result
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from curves import Curve, drawn
from row_models import LLAMA, MIXTRAL, TINY
from table import line, tail

from lacuna.config.documents import BUILT_IN
from lacuna.parallel.processes import device_type

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
COLOURS = {
    "bfloat16": "#2b6cb0",
    "tensorwise": "#d9822b",
    "rowwise": "#2ca02c",
    "rowwise_with_gw_hp": "#9467bd",
}
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
EXPERTS = {"intermediate_size": 1408}
RUN = """
[model]
config = "{folder}/model.json"
tokenizer_path = "{text}"
[data]
dataset = "{text}"
[training]
batch_size = {rows}
seq_len = {length}
steps = {steps}
mixed_precision_param = "bfloat16"
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = {warmup}
decay_type = "cosine"
lr_min = 0.1
[validation]
dataset = "{text}"
freq = {freq}
[checkpoint]
enable_checkpoint = false
[metrics]
enable_tensorboard = false
"""


def main() -> None:
    given = arguments()
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder.resolve(), given)
    arms = [("bfloat16", seed) for seed in given.seeds] + [(one, given.seeds[0]) for one in RECIPES]
    logs = {arm: folder / f"{arm[0]}-{arm[1]}.log" for arm in arms}
    running = {arm: begin(folder, *arm, logs[arm], given.tiny) for arm in arms}
    failed = [arm for arm, process in running.items() if process.wait()]
    if failed:
        sys.exit("\n".join(f"{arm} failed:\n{tail(logs[arm])}" for arm in failed))
    runs = [{"arm": arm, "seed": seed, **curves_of(folder / f"{arm}-{seed}")} for arm, seed in arms]
    write_results(folder, runs)
    print((folder / "float8.md").read_text(), end="")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output", default="float8")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    given.steps = given.steps or (6 if given.tiny else 1000)
    return given


def write_run(folder: Path, given: argparse.Namespace) -> None:
    """Writes the model's configuration and the TOML that all runs have in common."""
    model = LLAMA | SHAPE
    if given.experts:
        model = MIXTRAL | SHAPE | EXPERTS
    (folder / "model.json").write_text(json.dumps(model | (TINY if given.tiny else {})))
    rows, length = (2, 64) if given.tiny else (16, 1024)
    settings = RUN.format(
        folder=folder,
        text=BUILT_IN,
        rows=rows,
        length=length,
        steps=given.steps,
        warmup=max(1, given.steps // 20),
        freq=max(1, given.steps // 20),
    )
    (folder / "run.toml").write_text(settings)


def begin(folder: Path, arm: str, seed: int, log: Path, tiny: bool) -> subprocess.Popen[bytes]:
    """Begins a run anew, whose output goes to its log."""
    run = folder / f"{arm}-{seed}"
    shutil.rmtree(run, ignore_errors=True)  # else it would go on from an earlier call's
    count = "--gpus" if device_type() == "cuda" else "--cpus"
    words = [sys.executable, "-m", "lacuna", "train", str(folder / "run.toml"), count, "1"]
    words += ["--job.dump_folder", str(run), "--training.seed", str(seed)]
    if arm != "bfloat16":
        words += ["--float8.enable_float8_linear", "true", "--float8.recipe_name", arm]
        words += ["--float8.filter_small", "false"]
        words += ["--float8.emulate", "true"] if device_type() == "cpu" else []
    if tiny:
        words += ["--validation.steps", "2", "--data.num_workers", "0"]
    with open(log, "w") as output:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def curves_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The losses of a run, each with its step."""
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        name: [(row["step"], row[name]) for row in rows if name in row]
        for name in ("loss", "val_loss")
    }


def write_results(folder: Path, runs: list[dict[str, Any]]) -> None:
    """Writes the JSON file, the table and the picture."""
    base = runs[0]
    (folder / "float8.json").write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    head = ("run", "seed", "held-out loss at the end", "less the first", "mean distance of losses")
    lines = [line(head), line(["---"] * len(head))]
    for run in runs:
        last = run["val_loss"][-1][1]
        cells = [run["arm"], str(run["seed"]), f"{last:.4f}"]
        cells += [f"{last - base['val_loss'][-1][1]:+.4f}", f"{distance(run, base):.4f}"]
        lines.append(line([*cells[:3], "–", "–"] if run is base else cells))
    (folder / "float8.md").write_text("\n".join(lines) + "\n")
    drawings = [Curve(run["arm"], COLOURS[run["arm"]], run["val_loss"]) for run in runs]
    (folder / "float8.svg").write_text(drawn(drawings, "steps"))


def distance(run: dict[str, Any], base: dict[str, Any]) -> float:
    """The mean distance of two runs' losses of training, over the steps that were reported."""
    pairs = zip(run["loss"], base["loss"], strict=True)
    return statistics.mean(abs(one - other) for (_, one), (_, other) in pairs)


if __name__ == "__main__":
    main()
