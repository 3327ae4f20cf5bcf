"""A pipeline's order is torch's, whole and runnable, or the run is refused with the reason."""

from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from lacuna.config import UserError, load_config
from lacuna.config.machine import SCHEDULES
from lacuna.parallel.schedule import Action, held_stages, pipeline_order
from layouts import pipeline

RANKS = (2, 3, 4, 8)


def refusal(schedule: str, file: Path | None, ranks: int, microbatches: int | None) -> str:
    with pytest.raises(UserError) as raised:
        pipeline_order(pipeline(schedule, ranks, file), microbatches)
    return str(raised.value)


def csv_text(order: dict[int, list[Action]]) -> str:
    return "".join(
        ",".join(f"{stage}{kind}{batch}" for stage, kind, batch in row) + "\n"
        for row in order.values()
    )


@pytest.mark.parametrize(("schedule", "ranks", "rounds"), product(SCHEDULES, RANKS, (1, 2, 3)))
def test_every_microbatch_goes_forward_and_backward_once_through_every_stage(
    schedule: str, ranks: int, rounds: int
) -> None:
    stages = ranks if schedule in ("GPipe", "1F1B") else 2 * ranks
    order = pipeline_order(pipeline(schedule, ranks), rounds * stages)
    done = Counter(action for actions in order.values() for action in actions)
    assert set(done.values()) == {1}
    for stage, microbatch in product(range(stages), range(rounds * stages)):
        kinds = {kind for kind in "FBIW" if Action(stage, kind, microbatch) in done}
        assert kinds in ({"F", "B"}, {"F", "I", "W"})
    assert sum(done.values()) == sum(
        3 if (s, "I", m) in done else 2 for s, k, m in done if k == "F"
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_number_there_is_a_microbatch_for_every_stage(schedule: str) -> None:
    order = pipeline_order(pipeline(schedule, 4))
    assert {action.microbatch for action in order[0]} == set(range(4 * len(held_stages(order)[0])))


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("1F1B", [[0], [1]]), ("Interleaved1F1B", [[0, 2], [1, 3]]), ("DualPipeV", [[0, 3], [1, 2]])],
)
def test_every_rank_holds_the_stages_of_its_schedule(
    schedule: str, stages: list[list[int]]
) -> None:
    assert held_stages(pipeline_order(pipeline(schedule, 2), 4)) == dict(enumerate(stages))


def test_the_order_of_1f1b() -> None:
    order = pipeline_order(pipeline("1f1b", 2), 3)
    assert csv_text(order) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert pipeline_order(pipeline("afab", 2), 3) == pipeline_order(pipeline("GPipe", 2), 3)


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError) as raised:
        load_config(None, ["--parallelism.pipeline_parallel_schedule", "Interleaved1F2B"])
    message = str(raised.value)
    assert (
        "parallelism.pipeline_parallel_schedule" in message
        and "did you mean Interleaved1F1B?" in message
    )
    assert all(schedule in message for schedule in SCHEDULES)


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "multiple"),
    [
        ("1F1B", 4, 3, 8),
        ("Interleaved1F1B", 2, 5, 4),
        ("InterleavedZeroBubble", 3, 7, 6),
        ("DualPipeV", 2, 3, 4),
    ],
)
def test_a_number_of_microbatches_that_the_schedule_cannot_run_is_refused_with_one_that_it_can(
    schedule: str, ranks: int, microbatches: int, multiple: int
) -> None:
    message = refusal(schedule, None, ranks, microbatches)
    assert message.startswith(
        f"parallelism.pipeline_parallel_schedule: {schedule} cannot run on {ranks} ranks: "
    )
    assert (
        f"make pipeline_parallel_microbatches a multiple of {multiple}, and give no split points"
        in message
    )
    assert pipeline_order(pipeline(schedule, ranks), multiple) and pipeline_order(
        pipeline(schedule, ranks), 3 * multiple
    )


@pytest.mark.parametrize(
    ("schedule", "stages", "said"),
    [
        ("1F1B", 4, "3 pipeline_parallel_split_points make 4 stages, not 2"),
        ("Interleaved1F1B", 2, "1 pipeline_parallel_split_points make 2 stages, not 4"),
        ("LoopedBFS", 5, "4 pipeline_parallel_split_points make 5 stages, not 4"),
        ("DualPipeV", 6, "exactly 2 stages per rank"),
    ],
)
def test_split_points_that_the_schedule_cannot_share_out_are_refused(
    schedule: str, stages: int, said: str
) -> None:
    points = [f"layers.{layer}" for layer in range(1, stages)]
    with pytest.raises(UserError, match=said):
        pipeline_order(pipeline(schedule, 2, points=points), 12)


def test_some_schedules_take_more_than_two_stages_per_rank() -> None:
    order = pipeline_order(
        pipeline("Interleaved1F1B", 2, points=[f"layers.{layer}" for layer in range(1, 6)]), 6
    )
    assert held_stages(order) == {0: [0, 2, 4], 1: [1, 3, 5]}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_file_can_hold_every_schedule(schedule: str, tmp_path: Path) -> None:
    order = pipeline_order(pipeline(schedule, 3), 6)
    file = tmp_path / "schedule.csv"
    file.write_text(csv_text(order))
    assert (
        pipeline_order(pipeline("1F1B", 3, file))
        == pipeline_order(pipeline("1F1B", 3, file), 6)
        == order
    )


def test_in_a_file_forward_and_backward_may_overlap_and_cells_be_empty(tmp_path: Path) -> None:
    order = pipeline_order(pipeline("1F1B", 2), 3)
    file = tmp_path / "schedule.csv"
    file.write_text(csv_text(order).replace("0B0,0F2,0B1", "0B0,,(0F2;0B1)OVERLAP_F_B"))
    assert pipeline_order(pipeline("1F1B", 2, file)) == order


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0,1X0\n", ":2: '1X0' is no action"),
        ("0F0,0B0\n1F0,1B\n", ":2: '1B' is no action"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", ":1: '0SEND_F0' is no action"),
        ("0F0,0B0\n", "needs a line per rank"),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", "needs a line per rank"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "with equally many stages"),
        ("0F0,1F0,1B0,0B0\n,\n", "with equally many stages"),
        ("", "needs a line per rank"),
        (",\n,\n", "needs a line per rank"),
        ("0F0,0F1,0B0,0I0,0W0\n1F0,1F1,1B0,1B1\n", "nothing twice"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "nothing twice"),
        ("0F0,0I0,0W0,0W0\n1F0,1B0\n", "nothing twice"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "expected 2 total backwards"),
        ("0F0,0B0\n1F0,1F1,1B0,1B1\n", "microbatches for stage 0, expected 2"),
        ("0F0,0I0\n1F0,1B0\n", "I and W must have equal counts"),
        ("0B0,0F0\n1F0,1B0\n", "without first running Forward"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "can't schedule sends/recvs"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    message = refusal("1F1B", file, 2, None)
    assert (
        message.startswith(f"parallelism.pipeline_parallel_schedule_csv: {file}")
        and said in message
    )


def test_a_file_that_is_not_there_or_has_other_microbatches_is_refused(tmp_path: Path) -> None:
    assert "none.csv cannot run on 2 ranks: No such file" in refusal(
        "1F1B", tmp_path / "none.csv", 2, None
    )
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    assert "can't decode" in refusal("1F1B", tmp_path / "binary.csv", 2, None)
    (tmp_path / "two.csv").write_text(csv_text(pipeline_order(pipeline("1F1B", 2), 2)))
    message = refusal("1F1B", tmp_path / "two.csv", 2, 4)
    assert "it has 2 micro-batches: set pipeline_parallel_microbatches to it, not 4;" in message
