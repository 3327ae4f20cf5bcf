r"""Trains and measures small models that differ in their attention alone, as softpick's paper does.

python benchmarks/softpick_paper.py FOLDER --train FILE --held-out FILE --tokenizer FOLDER
    [--arms NAME ...] [--seeds N] [--trials NAME ...] [--limit-seconds 540] [--tiny]
    [--section.key value ...]

For each attention (arm) and seed a Llama of 85 million parameters beside its embedding is trained
from scratch by `lacuna train`, then measured: its held-out loss, also with weights of 8, 4, 3 and 2
bits, its attention sinks, and its hidden states. FOLDER gets ARM-SEED.json for each, and, of all
that are there, rows.json, table.md, and curves.svg. What is measured is not made again. A call ends
after --limit-seconds: the run that is not done is saved, the exit status is 1, and the same call
goes on from there. Other settings are those of `lacuna train`, for all runs alike. Calls at one
time, each on a GPU of its own, need folders of their own; `python benchmarks/paper_table.py FOLDER
OTHER ...` then writes the table and curves of all.

  --train FILE        texts to train on, JSON lines with a column text, compressed or not
  --held-out FILE     texts to measure with, likewise
  --tokenizer FOLDER  the tokenizer of all models
  --arms NAME ...     only these arms; default: all
  --seeds N           seeds of each arm; default: 3 for softmax and softpick, 1 for the others
  --trials NAME ...   only these, ARM-SEED each, in this order, in place of --arms and --seeds
  --limit-seconds N   time of this call (default: 540)
  --rows N            held-out rows that are measured, spread over all there are (default: 64)
  --tiny              a model of two small layers, for a CPU: a test of the driver, no result
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import paper_table

ARMS = {
    "softmax": "auto",
    "softpick": "softpick",
    "scaled_softpick": "scaled_softpick",
    "rectified": "rectified",
    "softmax_plus_one": "softmax_plus_one",
    "softmax_sinks": "softmax_sinks",
    "gated_softmax": "gated_softmax",
}
SEVERAL = ("softmax", "softpick")  # which the paper is about
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 8192,
    "initializer_range": 0.006,  # the paper's
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SETTINGS = """
[job]
name = "{name}"
dump_folder = "{folder}"
[model]
config = "{model}"
tokenizer_path = "{tokenizer}"
attention = "{attention}"
[training]
steps = 1000
seq_len = 1024
batch_size = 32
global_batch_size = 128
seed = {seed}
[data]
dataset = "{train}"
document_mask = false  # as in the paper's runs, and as rows are read when they are measured
[validation]
dataset = "{held_out}"
dataset_split = "train"
freq = 100
steps = 4
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 100
decay_type = "cosine"
lr_min = 0.1
[checkpoint]
interval = 250
keep_latest_k = 2
export_dtype = "float32"
[metrics]
attention = 50
"""
SMALL = (
    *("--training.seq_len", "64", "--training.batch_size", "4", "--training.steps", "8"),
    *("--training.global_batch_size", "4", "--validation.freq", "4", "--metrics.attention", "4"),
    *("--lr_scheduler.warmup_steps", "2", "--metrics.enable_tensorboard", "false"),
)

# Of a run that was stopped: after it had saved, or before it had begun.
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)


@dataclass(frozen=True)
class Trial:
    """One arm with one seed, in a folder of its own below that of the call."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"


def main() -> None:
    given, flags = arguments()
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + given.limit_seconds
    done = True
    for trial in trials(given):
        if (folder / f"{trial.name}.json").exists():
            continue
        if not trained(trial, given, flags, ends):
            done = False
            break
        from paper_measures import measured  # which imports torch: runs begin without waiting

        row = {"arm": trial.arm, "seed": trial.seed} | measured(folder / trial.name, given.rows)
        (folder / f"{trial.name}.json").write_text(json.dumps(row, indent=1) + "\n")
        for part in ("hf", "checkpoint"):  # gigabytes, which nobody needs now
            shutil.rmtree(folder / trial.name / part, ignore_errors=True)
        paper_table.write(folder)
        print(paper_table.told(row), flush=True)
    if not done:
        print("The time is over: the same call again goes on.", file=sys.stderr)
    sys.exit(0 if done else 1)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """What is given, and the settings of runs among it."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--train", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--trials", nargs="+", type=trial_of)
    parser.add_argument("--limit-seconds", type=float, default=540)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tiny", action="store_true")
    given, flags = parser.parse_known_args()
    for name in ("train", "held_out", "tokenizer"):
        if not Path(getattr(given, name)).exists():
            parser.error(f"--{name.replace('_', '-')}: there is no {getattr(given, name)}")
    if given.rows < 1 or (given.seeds is not None and given.seeds < 1):
        parser.error("--rows and --seeds must be at least 1")
    return given, flags


def trial_of(name: str) -> Trial:
    arm, _, seed = name.rpartition("-")
    if arm not in ARMS or not seed.isdecimal():
        raise argparse.ArgumentTypeError(f"{name} is no ARM-SEED, as softmax-0 is")
    return Trial(arm, int(seed))


def trials(given: argparse.Namespace) -> list[Trial]:
    """What is to be trained: all arms with the first seed, then with the second, and so on."""
    if given.trials:
        return list(given.trials)
    counts = {arm: given.seeds or (3 if arm in SEVERAL else 1) for arm in given.arms}
    most = max(counts.values())
    return [Trial(arm, seed) for seed in range(most) for arm in counts if seed < counts[arm]]


def trained(trial: Trial, given: argparse.Namespace, flags: list[str], ends: float) -> bool:
    """Trains a trial on from where it is; whether it came to its end before the time `ends`."""
    folder = Path(given.folder).absolute()
    own = folder / trial.name
    own.mkdir(exist_ok=True)
    settings = own / "run.toml"
    settings.write_text(
        SETTINGS.format(
            name=trial.name,
            folder=own,
            model=write_model(folder, given),
            tokenizer=Path(given.tokenizer).absolute(),
            attention=ARMS[trial.arm],
            seed=trial.seed,
            train=Path(given.train).absolute(),
            held_out=Path(given.held_out).absolute(),
        )
    )
    small = SMALL if given.tiny else ()
    words = ["train", str(settings), *small, *flags]
    started = time.monotonic()
    status = run_until(words, ends, own / "train.log")
    with open(own / "seconds.txt", "a") as spent:
        spent.write(f"{time.monotonic() - started}\n")
    if status not in (0, *STOPPED):
        end = "\n".join((own / "train.log").read_text().splitlines()[-20:])
        sys.exit(f"{trial.name} failed; the end of {own / 'train.log'}:\n{end}")
    return status == 0


def run_until(words: list[str], ends: float, log: Path) -> int:
    """Runs `lacuna WORDS` with its output in `log`, and has it save and stop at the time `ends`."""
    with open(log, "a") as output:
        command = [sys.executable, "-m", "lacuna", *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            return process.wait(max(ends - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            return process.wait()


def write_model(folder: Path, given: argparse.Namespace) -> Path:
    """The configuration of the model, with as many rows as the tokenizer has tokens."""
    from transformers import AutoTokenizer

    path = folder / "model.json"
    if not path.exists():
        tokens = AutoTokenizer.from_pretrained(given.tokenizer)
        ids = {"vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id}
        path.write_text(json.dumps(SHAPE | (TINY if given.tiny else {}) | ids, indent=1))
    return path


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
