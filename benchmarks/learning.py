r"""Does it learn? Runs by reward on arithmetic, several seeds each, and TRL's trainer beside them.

python benchmarks/learning.py [--output FOLDER] [--limit-seconds 540] [--only RUN ...] [--report]

A small model is first trained on sums with careless answers (sft), then by reward: grpo-SEED,
success-SEED (the same with curriculum.by_success), ppo-SEED; trl-SEED, trl-static-SEED and
trl-batches-SEED are TRL's GRPOTrainer with the same model, prompts, groups and lengths, by its
ways to generate in its own process. A call goes on where the last one ended, and stops in time,
whatever is under way; call it until it says that all is done. FOLDER/learning.json, .md and .svg
are written by each.

  --output FOLDER     where everything goes (learning)
  --limit-seconds N   time of this call; what is under way saves itself and ends (540)
  --only RUN ...      these runs alone, in this order, such as grpo-0 trl-0
  --list              print the runs instead, with what is done
  --report            measure nothing, write the tables and the picture of what is there
  --seeds N           seeds of our runs (3); --trl-seeds N: of TRL's (1)
  --steps N           batches of prompts in a run by reward (300)
  --freq N            batches of prompts between two validations (20)
  --sft-steps N       steps before (1500); 0 begins with the weights of --model
  --model FOLDER      a model to begin with in place of one from scratch: folder or Hub id
  --lr X              learning rate of the adapters of all runs by reward (3e-4)
  --max-tokens N      longest completion (32; 256 with --long and --speed)
  --target X          held-out accuracy up to which samples are counted (nine tenths of GRPO's way)
  --trl FOLDER        where TRL 1.16 and accelerate lie, if they are not installed
  --long              sums of up to 19 numbers whose answers write every step out: about 100
                      tokens, 64 prompts × 8 a step, 60 steps
  --speed             no learning: a dozen updates of random weights in SmolLM2 135M's shape, 32
                      prompts × 8 completions of 256 tokens, by grpo-0 and TRL's ways
  --tiny              a tiny model and few steps, for CPUs: a test of this, no result
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import learning_report
from learning_settings import TRL_WAYS, Learning, wanted
from learning_task import LARGE, LONG, SPEED, TINY, Sizes, write_model, write_task

OF_THE_FOLDER = (
    *("steps", "freq", "sft_steps", "model", "lr", "max_tokens"),
    *("long", "speed", "tiny"),
)
"""What all calls with the same output have to agree in."""
GRACE = 60
"""Seconds that a run is given to save itself, before it is killed."""


def main() -> None:
    given = arguments()
    output = Path(given.output)
    output.mkdir(parents=True, exist_ok=True)
    sizes = sizes_of(given)
    runs = wanted(given, sizes)
    if given.list:
        for one in runs:
            print(one.name, "done" if is_done(output, one) else "to do")
        return
    ends = time.monotonic() + given.limit_seconds
    failed = set()
    if not given.report:
        prepare(output, sizes, given)
        for one in runs:
            if not is_done(output, one) and time.monotonic() < ends:
                print(f"{one.name}: {go_on(output, one, sizes, given, ends)}", flush=True)
                if not is_done(output, one) and time.monotonic() < ends:
                    failed.add(one.name)
                    print(tail(output / f"{one.name}.log"), flush=True)
            if one.name == "sft" and not is_done(output, one):
                break  # all others begin with it
    print(learning_report.write(output, sizes, given.target))
    left = [one.name for one in runs if not is_done(output, one)]
    print(f"to do: {', '.join(left)}; call it again" if left else "all is done")
    if failed:
        sys.exit(f"failed: {', '.join(sorted(failed))}; their logs are in {output}")


def sizes_of(given: argparse.Namespace) -> Sizes:
    """How much there is of everything in the runs that are asked for."""
    sizes = SPEED if given.speed else TINY if given.tiny else LONG if given.long else LARGE
    return replace(sizes, max_tokens=given.max_tokens or sizes.max_tokens)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="learning")
    parser.add_argument("--limit-seconds", type=float, default=540)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trl-seeds", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--freq", type=int)
    parser.add_argument("--sft-steps", type=int)
    parser.add_argument("--model")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--target", type=float, help="accuracy that samples are counted up to")
    parser.add_argument("--trl")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    usual = 4 if given.tiny else 12 if given.speed else 60 if given.long else 300
    given.steps = given.steps or usual
    given.freq = given.freq or (2 if given.tiny else 20)
    given.lr = given.lr or 3e-4
    if given.speed:
        given.sft_steps = 0
        given.seeds = 1
        given.model = str(Path(given.output).resolve() / "model")
        given.only = given.only or ["grpo-0", *(f"{way}-0" for way in TRL_WAYS)]
    if given.sft_steps is None:
        given.sft_steps = 20 if given.tiny else 1500
    if not given.sft_steps and not given.model:
        parser.error("--sft-steps 0 leaves nothing to begin with: give --model")
    return given


def prepare(output: Path, sizes: Sizes, given: argparse.Namespace) -> None:
    """Writes the task and the model, once; refuses a folder of other sizes or settings."""
    asked = {name: getattr(given, name) for name in OF_THE_FOLDER}
    file = output / "settings.json"
    if file.exists():
        before = json.loads(file.read_text())
        if before != asked:
            sys.exit(f"{output} is of {before}, and this call of {asked}: give another --output")
        return
    write_task(output / "task", sizes)
    write_model(output / "model", sizes, random_weights=given.speed)
    file.write_text(json.dumps(asked))


def is_done(output: Path, one: Learning) -> bool:
    return (output / one.name / "finished.json").exists()


def go_on(output: Path, one: Learning, sizes: Sizes, given: argparse.Namespace, ends: float) -> str:
    """Goes on with a run until it ends or the time does; says which."""
    folder = output / one.name
    folder.mkdir(exist_ok=True)
    environment = dict(os.environ)
    if one.is_trl:
        way = TRL_WAYS[one.name.rpartition("-")[0]]
        task = {"settings": one.settings, "way": way, "parts": sizes.parts}
        (folder / "task.json").write_text(json.dumps(task))
        words = [sys.executable, str(Path(__file__).with_name("learning_trl.py")), str(folder)]
        if given.trl:
            paths = [given.trl, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    else:
        settings = one.settings | {"job.dump_folder": str(folder.resolve())}
        file = output / f"{one.name}.toml"
        # What JSON writes of these values is TOML as well.
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
        file.write_text("".join(lines))
        words = [sys.executable, "-m", "lacuna", "train", str(file)]
    began = time.monotonic()
    status = run_until(words, ends, output / f"{one.name}.log", environment)
    call = {"run": one.name, "seconds": time.monotonic() - began, "call": os.getpid()}
    with open(output / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(call | {"device": learning_report.device()}) + "\n")
    if is_done(output, one):
        return f"done after {call['seconds']:.0f} s more"
    return "saved where it is, for the time is over" if status is None else f"status {status}"


def run_until(words: list[str], ends: float, log: Path, environment: dict[str, str]) -> int | None:
    """Runs a command with its output added to `log`; its exit status, None if time was over."""
    with open(log, "a") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            return process.wait(max(ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return None


def tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-12:])


if __name__ == "__main__":
    main()
