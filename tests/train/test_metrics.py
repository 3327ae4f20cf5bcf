"""What a run reports: the right keys, numbers that mean what they say, the same in every place."""

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runs import METRICS, checkpoint, curve, rows, together, train, write_documents

pytestmark = pytest.mark.slow  # whole runs of the command line

STEPS = 120


class Reported(NamedTuple):
    """Runs on a mixture of two sources: two ranks that log every step, and one that seldom does.

    The second was started again from the middle, after it had come to its end.
    """

    every: Path
    seldom: Path
    sources: list[str]


@pytest.fixture(scope="module")
def reported(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Reported:
    folder = tmp_path_factory.mktemp("reported")
    other = write_documents(folder / "other.jsonl", random.Random(2), 200)
    sources = [str(world / "train.jsonl"), str(other)]
    flags = (
        "--training.steps",
        STEPS,
        "--data.dataset",
        ",".join(sources),
        "--data.data_probs",
        "0.8,0.2",
        "--validation.dataset",
        world / "validation.jsonl",
        "--validation.dataset_split",
        "train",
        "--validation.freq",
        50,
        "--checkpoint.interval",
        60,
        "--metrics.enable_tensorboard",
    )
    every, seldom = folder / "every", folder / "seldom"
    seldom_flags = (*flags, "--training.batch_size", 8, "--metrics.log_freq", 7)
    together(
        lambda: train(world, every, *flags, "--cpus", 2, "--metrics.rank_0_only", "false"),
        lambda: train(world, seldom, *seldom_flags),
    )
    shutil.rmtree(checkpoint(seldom, STEPS))
    (seldom / "finished.json").unlink()
    assert "resuming after step 60" in train(world, seldom, *seldom_flags)
    return Reported(every, seldom, sources)


def training_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder) if "loss" in row]


def shares_of(sources: list[str]) -> list[str]:
    return [f"share_{number}_{source}" for number, source in enumerate(sources)]


def test_rows_have_the_documented_keys_and_those_of_a_mixture_its_shares(
    reported: Reported,
) -> None:
    assert [row["step"] for row in training_rows(reported.every)] == list(range(1, STEPS + 1))
    for row in rows(reported.every):
        training = [*METRICS, *shares_of(reported.sources)]
        assert list(row) == (
            training
            if "loss" in row
            else ["step", "val_loss", "val_bits_per_byte", "val_token_accuracy"]
        )


def test_numbers_are_what_their_names_say(reported: Reported) -> None:
    for row in training_rows(reported.every):
        assert row["tokens"] == row["step"] * 2 * 4 * 32, "of both ranks"
        assert row["mfu"] is None, "a CPU's peak is not known"
        assert row["skipped_steps"] == 0
        assert 0 < row["data_wait_fraction"] < 1
        assert 0.1 < row["memory_gib"] < 8
        assert row["tokens_per_second"] > 0
        assert row["grad_norm"] > 0
    rates = dict(curve(reported.every, "lr"))
    decay = STEPS - 1
    assert [rates[step] for step in (1, 2, 3, STEPS)] == pytest.approx(
        [1.5e-3, 3e-3 * decay / (decay + 1), 3e-3 * (decay - 1) / (decay + 1), 3e-3 / (decay + 1)]
    )


def test_a_seldom_row_tells_of_its_own_step_alone(reported: Reported) -> None:
    keys = ("loss", "grad_norm", "lr", "tokens")
    every = {step: rest for step, *rest in curve(reported.every, *keys)}
    seldom = {step: rest for step, *rest in curve(reported.seldom, *keys)}
    assert list(seldom) == [1, *range(7, STEPS, 7), STEPS]
    for step, rest in seldom.items():
        assert rest == pytest.approx(every[step], rel=1e-3)  # rounding grows with the steps
    assert seldom[7] == pytest.approx(every[7], rel=1e-5)


def test_each_sources_share_is_logged_and_comes_near_its_weight(reported: Reported) -> None:
    last = training_rows(reported.every)[-1]
    shares = [last[name] for name in shares_of(reported.sources)]
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx([0.8, 0.2], abs=0.06)


def test_every_rank_writes_its_own_file_when_asked(reported: Reported) -> None:
    mirror = reported.every / "mirror"
    mirror.mkdir()
    shutil.copy(reported.every / "metrics-rank-1.jsonl", mirror / "metrics.jsonl")
    assert curve(mirror, "loss", "grad_norm", "tokens") == curve(
        reported.every, "loss", "grad_norm", "tokens"
    )
    assert (reported.every / "tb" / "rank-1").is_dir()


def test_tensorboard_holds_the_same_numbers_also_after_a_resume(reported: Reported) -> None:
    accumulator = EventAccumulator(
        str(reported.seldom / "tb"), size_guidance={"scalars": 0}
    ).Reload()
    board = {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }
    written: dict[str, list[tuple[int, float]]] = {}
    for row in rows(reported.seldom):
        for key, value in row.items():
            if key != "step" and value is not None:
                written.setdefault(key, []).append((row["step"], value))
    unnamed = {
        key if not key.startswith("share_") else key[:7]: points for key, points in written.items()
    }
    assert unnamed.keys() == {tag if not tag.startswith("share_") else tag[:7] for tag in board}
    for tag, points in board.items():
        expected = unnamed[tag if not tag.startswith("share_") else tag[:7]]
        assert [step for step, _ in points] == [step for step, _ in expected]
        assert [value for _, value in points] == pytest.approx(
            [value for _, value in expected], rel=1e-6
        )


def test_a_run_that_steps_in_the_backward_pass_reports_no_norm(world: Path, tmp_path: Path) -> None:
    train(
        world,
        tmp_path,
        "--optimizer.early_step_in_backward",
        "--training.max_norm",
        0,
        "--training.steps",
        2,
    )
    assert [norm for _, norm in curve(tmp_path, "grad_norm")] == [None, None]
