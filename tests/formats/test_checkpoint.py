"""A run goes on from the newest checkpoint that is whole, or says why it cannot."""

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lacuna.config import Config, UserError
from lacuna.config.sections import JobConfig
from lacuna.formats.checkpoint import find_damage, newest_complete, prepare_folder
from lacuna.formats.finding import find_form
from lacuna.parallel.processes import Process
from lacuna.train.start import find_start
from runs import (
    as_stopped,
    checkpoint,
    curve,
    ended,
    rows,
    start,
    steps,
    together,
    train,
    wait_until,
    weights,
)

STEPS = 8
TENSORS = "__0_0.distcp"
EVERY_SECOND = ("--checkpoint.interval", 2)
FILE_LIMIT = 600_000  # bytes, fewer than a checkpoint's tensors have


def flip(path: Path, position: int) -> None:
    """Changes one byte of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def rewrite(path: Path, manifest: object) -> None:
    """Gives a checkpoint another manifest."""
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda path: os.truncate(path / TENSORS, 1000),
        f"{TENSORS} has 1000 bytes instead of",
    ),
    "missing": (lambda path: (path / "state.pt").unlink(), "state.pt is missing"),
    "flipped": (lambda path: flip(path / TENSORS, 100_000), f"{TENSORS} is damaged"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "cut manifest": (
        lambda path: os.truncate(path / "manifest.json", 50),
        "manifest.json is damaged",
    ),
    "empty manifest": (
        lambda path: os.truncate(path / "manifest.json", 0),
        "manifest.json is damaged",
    ),
    "nothing in the manifest": (lambda path: rewrite(path, {}), "manifest.json is damaged"),
    "no pairs in it": (
        lambda path: rewrite(path, {"state.pt": 1, ".metadata": []}),
        "manifest.json is damaged",
    ),
    "no tensors in the manifest": (
        lambda path: rewrite(path, {"state.pt": [1, 2]}),
        "manifest.json is damaged",
    ),
    "a file": (lambda path: (shutil.rmtree(path), path.write_text("")), "it is a file"),
    "binary manifest": (lambda path: flip(path / "manifest.json", 5), "manifest.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_its_problem_and_passed_over(
    straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    folder = as_stopped(straight, tmp_path / "run", STEPS) / "checkpoint"
    assert newest_complete(str(folder), Process()) == str(folder / "step-8")
    apply, problem = DAMAGES[damage]
    apply(folder / "step-8")
    assert problem in str(find_damage(str(folder / "step-8"), Process()))
    assert newest_complete(str(folder), Process()) == str(folder / "step-6")
    assert f"skipping the damaged checkpoint {folder / 'step-8'}: {problem}" in caplog.text


def test_damage_to_any_file_of_a_checkpoint_is_noticed(straight: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint(straight, STEPS), tmp_path / "step-8")
    generator = random.Random(0)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert {TENSORS, ".metadata", "state.pt", "config.json", "tokenizer.json"} <= {
        path.name for path in files
    }
    assert sorted(json.loads((folder / "manifest.json").read_text())) == sorted(
        str(path.relative_to(folder)) for path in files
    )
    for path in files:
        position = generator.randrange(path.stat().st_size)
        flip(path, position)
        assert str(path.relative_to(folder)) in str(find_damage(str(folder), Process())), position
        flip(path, position)
        path.rename(tmp_path / "aside")
        assert str(find_damage(str(folder), Process())) == f"{path.relative_to(folder)} is missing"
        (tmp_path / "aside").rename(path)
    assert find_damage(str(folder), Process()) is None


@pytest.fixture(scope="module")
def said(
    world: Path, straight: Path, weights_only: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What runs in `folder` said that went on from an earlier checkpoint, or could not."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("damaged", "shared damage", "damaged load_step"):
        as_stopped(straight, folder / name, STEPS)
    for name in ("load_step", "missing load_step"):
        shutil.copytree(straight, folder / name)
    shutil.copytree(weights_only, folder / "weights only")
    os.truncate(checkpoint(folder / "damaged", 8) / TENSORS, 1000)
    for leftover in (".unfinished-step-8", ".removed-step-2", ".unfinished-step-10"):
        shutil.copytree(checkpoint(straight, 2), folder / "damaged" / "checkpoint" / leftover)
    read_by_second_rank = sorted(
        json.loads((checkpoint(straight, 8) / "manifest.json").read_text())
    )[1]
    flip(checkpoint(folder / "shared damage", 8) / read_by_second_rank, 10)
    flip(checkpoint(folder / "damaged load_step", 6) / TENSORS, 100_000)

    def go_on(name: str, *flags: object, status: int = 0) -> str:
        return train(world, folder / name, *EVERY_SECOND, *flags, status=status)

    calls = {
        "second": lambda: start_twice(world, folder / "second"),
        "shared damage": lambda: go_on("shared damage", "--cpus", 2, "--training.batch_size", 2),
        "damaged": lambda: go_on("damaged"),
        "load_step": lambda: "".join(
            go_on("load_step", "--checkpoint.load_step", 4) for _ in range(2)
        ),
        "missing load_step": lambda: go_on(
            "missing load_step", "--checkpoint.load_step", 5, status=2
        ),
        "damaged load_step": lambda: go_on(
            "damaged load_step", "--checkpoint.load_step", 6, status=2
        ),
        "weights only": lambda: go_on("weights only", "--training.steps", STEPS, status=2),
    }
    outputs = dict(zip(calls, together(*calls.values()), strict=True))
    return {name: " ".join(output.split()) for name, output in outputs.items()} | {
        "folder": str(folder)
    }


def start_twice(world: Path, folder: Path) -> str:
    """What a second run says in the folder of one that is not over, only halted."""
    first = start(
        "train", world / "run.toml", "--job.dump_folder", folder, "--training.steps", 100_000
    )
    with ended(first):
        wait_until(lambda: len(rows(folder)) > 0, first)
        first.send_signal(signal.SIGSTOP)
        (folder / "logs").mkdir()
        (folder / "logs" / "rank-1.log").write_text("of the first")
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        output = train(world, folder, "--cpus", 2, status=2)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        return output


@pytest.mark.slow
def test_a_run_goes_on_from_before_a_damaged_checkpoint_to_the_same_weights(
    straight: Path, said: dict[str, str]
) -> None:
    folder = Path(said["folder"]) / "damaged"
    damaged = checkpoint(folder, 8)
    problem = f"skipping the damaged checkpoint {damaged}: {TENSORS} has 1000 bytes instead of"
    assert problem in said["damaged"]
    assert f"resuming after step 6 from {checkpoint(folder, 6)}" in said["damaged"]
    assert weights(folder) == weights(straight)
    assert curve(folder) == curve(straight)
    assert steps(folder) == [2, 4, 6, 8]
    assert find_damage(str(checkpoint(folder, 8)), Process()) is None, "the damaged one is replaced"


@pytest.mark.slow
def test_what_a_killed_run_left_half_written_or_half_deleted_is_cleaned_up(
    said: dict[str, str],
) -> None:
    assert list((Path(said["folder"]) / "damaged" / "checkpoint").glob(".*")) == []


def test_damage_that_one_rank_finds_is_known_to_all(straight: Path, said: dict[str, str]) -> None:
    folder = Path(said["folder"]) / "shared damage"
    assert f"skipping the damaged checkpoint {checkpoint(folder, 8)}" in said["shared damage"]
    assert "resuming after step 6" in said["shared damage"]
    for mine, its in zip(
        curve(folder, "loss", "tokens"), curve(straight, "loss", "tokens"), strict=True
    ):
        assert mine == pytest.approx(its, rel=1e-5)


def test_load_step_goes_back_to_that_step_even_in_a_finished_run(
    straight: Path, said: dict[str, str]
) -> None:
    folder = Path(said["folder"]) / "load_step"
    assert f"resuming after step 4 from {checkpoint(folder, 4)}" in said["load_step"]
    assert said["load_step"].count("resuming") == 1, "the second time it is finished"
    assert "is finished (step 8)" in said["load_step"]
    assert curve(folder) == curve(straight)
    assert weights(folder) == weights(straight)


def test_a_run_that_has_gone_on_since_its_end_is_opened_as_it_is_now(
    straight: Path, tmp_path: Path
) -> None:
    assert find_form(str(straight)) == (str(straight / "hf"), False)
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    ended = json.loads((folder / "finished.json").read_text())
    (folder / "finished.json").write_text(json.dumps(ended | {"step": 6}))
    assert find_form(str(folder)) == (str(checkpoint(folder, 8)), True)
    (checkpoint(folder, 8) / "state.pt").unlink()
    assert find_form(str(folder)) == (str(checkpoint(folder, 6)), True)


def test_a_run_all_of_whose_checkpoints_are_damaged_does_not_start_over_by_itself(
    straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "checkpoint"
    shutil.copytree(straight / "checkpoint", folder)
    for step in steps(tmp_path / "run"):
        (folder / f"step-{step}" / "state.pt").unlink()
    config = Config(job=JobConfig(dump_folder=str(tmp_path / "run")))
    with pytest.raises(
        UserError, match="none is complete: .* to start over on purpose move that folder away"
    ):
        find_start(config.checkpoint, str(folder), False, Process())
    shutil.copytree(
        checkpoint(straight, 8), folder / "step-0"
    )  # which is where the run had started
    with pytest.raises(UserError, match="none is complete"):
        find_start(config.checkpoint, str(folder), False, Process())
    for step in (2, 4, 6, 8):
        shutil.rmtree(folder / f"step-{step}")
    assert find_start(config.checkpoint, str(folder), False, Process())[0] == str(folder / "step-0")


def test_a_file_in_a_checkpoints_place_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "step-50").write_text("")
    with pytest.raises(
        UserError, match="step-50 is a file, where the checkpoint of a step belongs: move it away"
    ):
        prepare_folder(str(tmp_path))
    with pytest.raises(UserError, match="checkpoint.folder: cannot write to"):
        prepare_folder(str(tmp_path / "step-50"))


REFUSALS = {
    "missing load_step": (
        "lacuna: checkpoint.load_step: there is no checkpoint ",
        "checkpoint/step-5",
    ),
    "damaged load_step": (
        "lacuna: checkpoint.load_step: ",
        f"checkpoint/step-6 cannot be used: {TENSORS} is damaged",
    ),
    "weights only": ("checkpoint/step-4 holds weights only", "checkpoint.initial_load_path = "),
    "second": (
        "lacuna: job.dump_folder: another run is writing to ",
        "stop it, or choose another folder",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_is_refused_with_one_message(said: dict[str, str], what: str) -> None:
    assert all(part in said[what] for part in REFUSALS[what]), said[what]
    assert said[what].count("lacuna: ") == 1
    assert "Traceback" not in said[what]


def test_a_disk_that_takes_no_more_ends_a_run_clearly_and_leaves_the_last_checkpoint(
    world: Path, straight: Path, tmp_path: Path
) -> None:
    def go_on(mode: str) -> None:
        folder = as_stopped(straight, tmp_path / mode, 4)
        flags = (*EVERY_SECOND, "--checkpoint.async_mode", mode)
        with ended(
            start("train", world / "run.toml", "--job.dump_folder", folder, *flags)
        ) as process:
            resource.prlimit(
                process.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT)
            )  # needs no rights
            output = " ".join(process.communicate(timeout=180)[0].split())
        assert process.returncode == 1, output
        assert (
            f"lacuna: cannot write the checkpoint {checkpoint(folder, 6)}: [Errno 27] File too "
            "large" in output
        )
        assert "Traceback" not in output
        assert steps(folder) == [2, 4]
        assert list((folder / "checkpoint").glob(".*")) == []

    together(lambda: go_on("disabled"), lambda: go_on("async"))
    assert "resuming after step 4" in train(world, tmp_path / "disabled", *EVERY_SECOND)
    assert weights(tmp_path / "disabled") == weights(straight)
    assert find_damage(str(checkpoint(tmp_path / "async", 4)), Process()) is None
