"""Runs the command line for tests, on a tiny model with data, and reads run folders."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from forked import Forked
from lacuna.cli import main

SOURCE = Path(__file__).parent.parent / "src"
SENTENCE = (
    "the a cat dog bird fish sat ran flew swam on "
    "under over near mat house tree river and then but so"
)
WORDS = SENTENCE.split()
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NGPU",
)
METRICS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "mfu",
    "memory_gib",
    "data_wait_fraction",
    "skipped_steps",
)
"""The keys of a row about training, in their order."""

Process = Forked | subprocess.Popen[str]
READ_AT_IMPORT = ("PYTHONPATH", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_HOME", "HF_TOKEN")
"""Variables that libraries read once. A run with other values must import the libraries itself."""

AT_ONCE = 2

RUN = """
[model]
config = "{world}/model"
[data]
dataset = "{world}/train.jsonl"
num_workers = 0
[training]
steps = 8
batch_size = 4
seq_len = 32
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 1
[checkpoint]
interval = 4
export_dtype = "float32"
[metrics]
log_freq = 1
enable_tensorboard = false
"""


def make_world(folder: Path) -> Path:
    """Fills `folder` with a tiny model's configuration and tokenizer, data, and a `run.toml`."""
    write_model(folder / "model")
    generator = random.Random(0)
    write_documents(folder / "train.jsonl", generator, 300)
    write_documents(folder / "validation.jsonl", generator, 20)
    (folder / "run.toml").write_text(RUN.format(world=folder))
    return folder


def write_model(folder: Path, **settings: Any) -> Path:
    """A tiny Llama's configuration and a tokenizer of bytes."""
    vocabulary = {
        letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocabulary | {"<end>": len(vocabulary)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    shape = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    LlamaConfig(**(shape | settings)).save_pretrained(folder)
    return folder


def write_documents(path: Path, generator: random.Random, count: int) -> Path:
    """JSON lines with a sentence of 5 to 40 words each."""
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(5, 40))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_pairs(path: Path, generator: random.Random, count: int) -> Path:
    """JSON lines with a prompt and two answers each, of which the first begins with a cat."""
    lines = []
    for _ in range(count):
        prompt, chosen, rejected = (" ".join(generator.choices(WORDS, k=5)) for _ in range(3))
        row = {"prompt": prompt, "chosen": f" cat {chosen}", "rejected": f" dog {rejected}"}
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return path


def environment(**more: str) -> dict[str, str]:
    """A child's environment: this source tree, the CPU, no network, and no launcher around it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("SLURM_")
    }
    return kept | {
        "PYTHONPATH": str(SOURCE),
        "LACUNA_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "250",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **more,
    }


def start(
    *words: object, apart: bool = False, cwd: Path | None = None, env: dict[str, str] | None = None
) -> Process:
    """Starts `lacuna <words>`, forked where that is possible.

    Its standard error is kept `apart`, or is among the output.
    """
    plain = environment()
    told = env or plain
    if any(told.get(name) != plain.get(name) for name in READ_AT_IMPORT):
        return start_anew(
            *words, cwd=cwd, env=told, stderr=subprocess.PIPE if apart else subprocess.STDOUT
        )
    return Forked([*map(str, words)], told, cwd or Path.cwd(), apart)


def start_anew(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Starts the same in a new process with a name of its own, as a user does."""
    settings = {
        "env": environment(),
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "stdin": subprocess.DEVNULL,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "lacuna", *map(str, words)], **(settings | options)
    )


class Ended(NamedTuple):
    """A process that has ended: its exit status, its output, and its standard error if apart."""

    status: int
    output: str
    errors: str = ""


def run_to_end(*words: object, timeout: float = 300, **options: Any) -> Ended:
    """Runs `lacuna <words>` to its end, whatever that is."""
    process = start(*words, **options)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"lacuna {words} did not end in {timeout} s:\n{output}") from None
    return Ended(process.returncode, output, errors or "")


def lacuna(*words: object, status: int = 0, timeout: float = 120, **options: Any) -> str:
    """Runs `lacuna <words>` to its end, checks its exit status, and returns what it printed."""
    outcome = run_to_end(*words, timeout=timeout, **options)
    assert outcome.status == status, (
        f"exit status {outcome.status}, not {status}:\n{outcome.output}"
    )
    return outcome.output


def train(world: Path, folder: Path, *flags: object, status: int = 0, **options: Any) -> str:
    """`lacuna train` of the world's run.toml into `folder`; returns what it printed."""
    return lacuna(
        "train", world / "run.toml", "--job.dump_folder", folder, *flags, status=status, **options
    )


def refused(*words: object) -> str:
    """Returns what `lacuna <words>` says of wrong input.

    It runs in this process, where nothing has to be imported again.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), mock.patch.dict(os.environ, environment()):
            assert main([*map(str, words)]) == 2
    finally:
        # What only a model tells is refused by ranks that have come together.
        if dist.is_initialized():
            dist.destroy_process_group()
    return said.getvalue()


def wait_until(
    condition: Callable[[], bool], process: Process, timeout: float = 180, pause: float = 0.005
) -> None:
    """Waits for `condition`, looking every `pause` seconds, while `process` lives."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, f"the process ended early:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


def stop_after(
    step: int, world: Path, folder: Path, *flags: object, number: int = signal.SIGTERM
) -> str:
    """Starts a run, signals it once it has logged `step`, and returns what it printed.

    Its exit status must tell of the signal.
    """
    process = start("train", world / "run.toml", "--job.dump_folder", folder, *flags)
    wait_until(lambda: any(row["step"] >= step for row in rows(folder)), process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, f"exit status {process.returncode}:\n{output}"
    return output


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Makes the calls side by side, a few at a time, and returns their results.

    One run's start-up keeps one core busy.
    """
    with ThreadPoolExecutor(min(len(calls), AT_ONCE)) as pool:
        return [result.result() for result in [pool.submit(call) for call in calls]]


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, training and validation."""
    path = folder / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )


def curve(folder: Path, *keys: str) -> list[tuple[Any, ...]]:
    """(step, loss, grad_norm), or the given keys, of every training row."""
    return [
        tuple(row[key] for key in ("step", *(keys or ("loss", "grad_norm"))))
        for row in rows(folder)
        if "loss" in row
    ]


def weights(folder: Path) -> bytes:
    """The bytes of the final model's weights."""
    return (folder / "hf" / "model.safetensors").read_bytes()


def checkpoint(folder: Path, step: int) -> Path:
    """Where the run keeps the checkpoint of a step."""
    return folder / "checkpoint" / f"step-{step}"


def steps(folder: Path) -> list[int]:
    """The steps of the run's checkpoints, oldest first."""
    return sorted(
        int(path.name.removeprefix("step-")) for path in (folder / "checkpoint").glob("step-*")
    )


def as_stopped(straight: Path, folder: Path, step: int) -> Path:
    """Copies a run to `folder` as it was when it had saved `step`, and returns that."""
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "hf")
    (folder / "finished.json").unlink()
    for later in steps(folder):
        if later > step:
            shutil.rmtree(checkpoint(folder, later))
    assert steps(folder)[-1] == step
    for name in ("metrics.jsonl", "completions.jsonl"):
        if (folder / name).exists():
            lines = (folder / name).read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            (folder / name).write_bytes(b"".join(kept))
    return folder


def processes_naming(text: str) -> list[int]:
    """The living processes, this one apart, whose command line holds `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and text in (entry / "cmdline").read_text() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def processes_in(folder: Path) -> list[int]:
    """The living processes whose working folder it is: those of a run that was started there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a zombie has none
            if (entry / "cwd").samefile(folder):
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def ended(process: Process) -> Iterator[Process]:
    """Within it the process may run; afterwards it has ended."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
