"""`lacuna train` says in one message what is wrong, with the right status, and stops when asked."""

import os
import re
import signal
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest

from lacuna import recipes
from runs import (
    Ended,
    ended,
    environment,
    lacuna,
    rows,
    run_to_end,
    start,
    start_anew,
    steps,
    stop_after,
    together,
    wait_until,
    write_model,
)

WRONG = {
    "an unknown key": (
        ("--training.sqe_len", 16),
        "training.sqe_len: there is no such setting",
        "training.seq_len",
    ),
    "a missing data file": (
        ("--data.dataset", "/nowhere/train.jsonl"),
        "data.dataset: /nowhere/train.jsonl does not",
    ),
    "a batch that micro-batches do not divide": (
        ("--training.global_batch_size", 6),
        "training.global_batch_size",
        "6 is no multiple of 4",
    ),
    "a value of the wrong kind": (("--optimizer.lr", "fast"), "optimizer.lr:", "fast"),
    "a folder under a file": (
        ("--job.dump_folder", "{world}/run.toml/run"),
        "job.dump_folder: cannot write to",
    ),
    "a file for a folder": (
        ("--job.dump_folder", "{world}/run.toml", "--dry-run"),
        "is a file; choose another",
    ),
    "an unwritable folder": (
        ("--job.dump_folder", "/proc/lacuna"),
        "job.dump_folder: cannot write to '/proc/lacuna",
    ),
    "no number of processes": (("--cpus", 0), "--cpus: wants a number of processes of at least 1"),
    "GPUs and CPUs": (("--gpus", 2, "--cpus", 2), "--cpus: not allowed with argument --gpus"),
}
"""Flags that are refused before anything is started, and what must be said."""

LATER = {
    "a missing tokenizer": (
        ("--model.config", "{folder}/bare"),
        "model.tokenizer_path",
        "{folder}/bare",
    ),
    "more tokens than positions": (
        ("--training.seq_len", 300),
        "training.seq_len: 300 is more than the 256 positions",
    ),
    "a setting for GPUs": (
        ("--checkpoint.async_mode", "async_with_pinned_mem"),
        "async_with_pinned_mem",
        "GPU",
    ),
    "a budget for code that is not compiled": (
        ("--activation_checkpoint.mode", "memory_budget"),
        "memory_budget",
        "compile.enable = true",
        "GPU",
    ),
    "a warmup longer than all epochs": (
        ("--training.steps", "none", "--training.epochs", 1, "--lr_scheduler.warmup_steps", 5000),
        "lr_scheduler.warmup_steps: 5000 is more than the ",
        " steps of the run",
    ),
    "a batch that ranks do not divide": (
        ("--training.global_batch_size", 4, "--parallelism.data_parallel_replicate_degree", 2),
        "training.global_batch_size: 4 is no multiple",
        "4 × 2 = 8",
    ),
}
"""The same for what is only known by the processes of the run."""

BY_RANKS = [
    ("a warmup longer than all epochs", 1),
    ("a missing tokenizer", 1),
    ("more tokens than positions", 2),
    ("a setting for GPUs", 1),
    ("a budget for code that is not compiled", 1),
    ("a setting for GPUs", 2),
    ("a batch that ranks do not divide", 2),
]


def flags_of_flame(world: Path) -> list[str]:
    """A command of flame's README without its TOML file, with a model and data of this world."""
    return f"""
      --job.dump_folder exp/llama.batch1.steps5
      --model.config {world}/model --model.tokenizer_path {world}/model
      --optimizer.name AdamW --optimizer.eps 1e-15 --optimizer.lr 3e-4
      --lr_scheduler.warmup_steps 2 --lr_scheduler.lr_min 0.1 --lr_scheduler.decay_type cosine
      --training.batch_size 1 --training.seq_len 128 --training.context_len 64 --training.varlen
      --training.gradient_accumulation_steps 1 --training.steps 5 --training.max_norm 1.0
      --training.skip_nan_inf --training.dataset {world}/train.jsonl --training.dataset_split train
      --training.streaming --training.num_workers 1 --training.prefetch_factor 2 --training.seed 42
      --checkpoint.interval 2 --checkpoint.load_step -1 --checkpoint.keep_latest_k 2
      --metrics.log_freq 1
    """.split()


def check_refused(outcome: Ended, *said: str) -> None:
    assert outcome.status == 2, outcome.output
    assert outcome.output.count("lacuna: ") == 1, outcome.output
    assert "Traceback" not in outcome.output
    for part in said:
        assert part in outcome.output
    assert outcome.output.count(said[0]) == 1, f"said more than once:\n{outcome.output}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of `outcomes` are, by their names."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(world: Path, folder: Path) -> dict[str, Ended]:
    """How runs ended: those refused late, by name and ranks, dry ones, and the quickstart."""
    write_model(folder / "bare")
    for path in (folder / "bare").glob("token*"):
        path.unlink()
    (folder / "elsewhere").mkdir()
    caches = {"HF_DATASETS_CACHE": str(folder / "datasets")}

    def run(name: str, *flags: object) -> Ended:
        words = [str(flag).format(folder=folder) for flag in flags]
        return run_to_end("train", world / "run.toml", "--job.dump_folder", folder / name, *words)

    calls = {
        "quickstart": lambda: run_to_end(
            "train",
            "--training.steps",
            2,
            "--validation.steps",
            1,
            cwd=folder / "elsewhere",
            env=environment(**caches),
        ),
        "dry": lambda: run("dry", "--dry-run", "--cpus", 2),
        "flags alone": lambda: run_to_end(
            "train", *flags_of_flame(world), cwd=folder / "elsewhere", env=environment(**caches)
        ),
        "dry and wrong": lambda: run("dry and wrong", "--dry-run", "--training.seq_len", 300),
        "no GPU": lambda: run("no GPU", "--gpus", 3),
    }
    for name, ranks in BY_RANKS:
        calls[f"{name} {ranks}"] = partial(run, f"{name} {ranks}", "--cpus", ranks, *LATER[name][0])
    return dict(zip(calls, together(*calls.values()), strict=True))


@pytest.mark.parametrize(("name", "ranks"), BY_RANKS)
def test_wrong_input_is_said_once_without_traceback_on_any_number_of_ranks(
    name: str, ranks: int, outcomes: dict[str, Ended], folder: Path
) -> None:
    check_refused(
        outcomes[f"{name} {ranks}"], *(part.format(folder=folder) for part in LATER[name][1:])
    )


@pytest.mark.parametrize("name", WRONG)
def test_what_can_be_known_at_once_is_refused_before_anything_is_started(
    name: str, world: Path, tmp_path: Path
) -> None:
    flags, *said = WRONG[name]
    flags = [str(flag).format(world=world) for flag in flags]
    folder = tmp_path / "run"
    for ranks in [()] if "--cpus" in flags else [(), ("--cpus", 2)]:
        check_refused(
            run_to_end("train", world / "run.toml", "--job.dump_folder", folder, *flags, *ranks),
            *said,
        )
        assert not folder.exists()


def test_all_that_is_wrong_is_said_together_with_the_nearest_names(world: Path) -> None:
    flags = ("--optimiser.lr", 1, "--training.step", 3, "--data.num_workers", -1)
    outcome = run_to_end("train", world / "run.toml", *flags)
    check_refused(outcome, "optimiser.lr: there is no such setting", "nearest is optimizer.lr")
    assert "the nearest is training.steps" in outcome.output
    assert "data.num_workers" in outcome.output


def test_an_unknown_command_a_missing_file_and_gpus_that_are_not_there_are_refused(
    tmp_path: Path, outcomes: dict[str, Ended], folder: Path
) -> None:
    check_refused(run_to_end("trian"), "'trian' is no command; did you mean train?")
    check_refused(
        run_to_end("train", tmp_path / "rum.toml"),
        f"{tmp_path}/rum.toml: cannot be read: No such file",
    )
    check_refused(
        outcomes["no GPU"],
        "--gpus 3 (or NGPU): this machine has no usable GPU(s): ask for fewer, or use --cpus 3",
    )
    assert not (folder / "no GPU").exists()


def test_help_groups_every_setting_with_its_default() -> None:
    output = lacuna("train", "--help")
    assert output.startswith("usage: lacuna train [RUN.toml]")
    order = [
        "--cpus N",
        "--dry-run",
        "[training]",
        "--training.seq_len",
        "(default: 2048)",
        "[data]",
        "[optimizer]",
        "--optimizer.lr",
        "(default: 0.0008)",
        "[checkpoint]",
        "--checkpoint.interval",
    ]
    places = [output.index(text) for text in order]
    assert places == sorted(places)
    assert "quickstart.toml" in output
    assert max(len(line) for line in output.splitlines()) <= 120
    assert lacuna() == lacuna("--help")
    assert "lacuna train alone runs the quickstart" in lacuna()


def test_a_dry_run_shows_size_batch_length_and_memory_and_leaves_nothing(
    outcomes: dict[str, Ended], folder: Path
) -> None:
    assert outcomes["dry"].status == 0, outcomes["dry"].output
    lines = {line.split("  ")[0]: line for line in outcomes["dry"].output.splitlines()}
    assert "LlamaForCausalLM, 106,944 parameters" in lines["model"]
    assert "2 on cpu" in lines["processes"]
    assert "8 sequences = 4 × 1 accumulated × 2 ranks" in lines["batch"]
    assert "256 (32 a sequence)" in lines["tokens a step"]
    assert "8, 2,048 tokens" in lines["steps"]
    assert (
        "peak 0.00263, in step 2 (optimizer.lr = 0.003, 1 steps of warmup)"
        in lines["learning rate"]
    )
    assert "GiB" in lines["memory a rank"]
    assert "Nothing was started." in lines
    check_refused(outcomes["dry and wrong"], "training.seq_len: 300 is more than the 256 positions")
    assert not (folder / "dry").exists() and not (folder / "dry and wrong").exists()


def test_ctrl_c_saves_and_stops_with_the_status_of_shells_on_any_number_of_ranks(
    world: Path, tmp_path: Path
) -> None:
    flags = ("--training.steps", 100_000, "--checkpoint.interval", 1_000_000)
    stop = partial(stop_after, 3, world, number=signal.SIGINT)
    outputs = together(
        lambda: stop(tmp_path / "one", *flags), lambda: stop(tmp_path / "two", *flags, "--cpus", 2)
    )
    for name, output in zip(("one", "two"), outputs, strict=True):
        last = rows(tmp_path / name)[-1]["step"]
        assert (
            f"Stopped and saved after step {last}. The same command goes on from there." in output
        )
        assert steps(tmp_path / name) == [last]
        assert "Traceback" not in output
        assert not (tmp_path / name / "hf").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_without_saving(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ("--cpus", 2, "--training.gradient_accumulation_steps", 20_000)  # a step takes minutes
    with ended(start("train", world / "run.toml", "--job.dump_folder", folder, *flags)) as process:
        wait_until((folder / "metrics.jsonl").exists, process)
        time.sleep(4)  # until it is in the step
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None, "the first asks to finish the step"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert output.count("lacuna: interrupted at once, without saving.") == 1
    assert "Traceback" not in output
    assert steps(folder) == []


def test_without_a_file_the_quickstart_trains_on_what_every_machine_has(
    outcomes: dict[str, Ended], folder: Path
) -> None:
    status, output, _ = outcomes["quickstart"]
    assert status == 0, output
    assert re.search(r"quickstart: [\d.]+ M parameters on 1 × cpu; 2 steps", output)
    assert "lacuna generate outputs/quickstart --prompt" in output
    run = folder / "elsewhere" / "outputs" / "quickstart"
    first, last = (row["val_loss"] for row in rows(run) if "val_loss" in row)
    assert last < first
    assert all((run / "hf" / name).exists() for name in ("model.safetensors", "tokenizer.json"))
    assert (run / "samples.jsonl").read_text().count('"prompt": "def ') == 2


def test_flags_alone_train_their_own_model_and_data_and_nothing_of_the_quickstart(
    outcomes: dict[str, Ended], folder: Path
) -> None:
    status, output, _ = outcomes["flags alone"]
    assert status == 0, output
    assert "llama.batch1.steps5: 0.1 M parameters on 1 × cpu; 5 steps of 1 × 128 tokens" in output
    run = folder / "elsewhere" / "exp" / "llama.batch1.steps5"
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5], "no validation on another's data"
    assert not (run / "samples.jsonl").exists() and "sample after" not in output
    assert steps(run) == [4, 5]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_is_small_enough_for_two_minutes_of_two_cores(tmp_path: Path) -> None:
    """Some of its steps are made: each of the others takes as long as one of these, at most."""
    recipe = tomllib.loads((Path(recipes.__path__[0]) / "quickstart.toml").read_text())
    every, made = recipe["training"]["steps"], 60
    assert every == 160
    start_up = 15  # seconds that no step takes: it takes 20, and more of them would count as steps
    settings = environment(HF_DATASETS_CACHE=str(tmp_path / "cache"), OMP_NUM_THREADS="1")
    before = os.times()
    # In a process of its own: those of runs that are forked are no children of this one.
    process = start_anew("train", "--training.steps", made, cwd=tmp_path, env=settings)
    output, _ = process.communicate(timeout=1200)
    after = os.times()
    assert process.returncode == 0, output
    spent = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    assert spent > 5, "the run was counted"
    assert start_up + (spent - start_up) * every / made < 200, (
        "seconds of processor time, which do not depend much on what else runs"
    )
    losses = [
        row["val_loss"] for row in rows(tmp_path / "outputs" / "quickstart") if "val_loss" in row
    ]
    # Its text is this Python's own library, of which Debian has less.
    assert losses[0] - losses[-1] > 1.5
    assert f"sample after step {made}" in output
