"""The timeline keeps to the schedule's order and waits for inputs; its bubble is the textbook's."""

from itertools import product

import pytest

from lacuna.parallel.schedule import SCHEDULES, Action, held_stages, pipeline_order
from lacuna.plan.timeline import Slot, bubble_share, makespan, simulate
from layouts import pipeline


def timeline_of(schedule: str, ranks: int, microbatches: int) -> dict[int, list[Slot]]:
    return simulate(pipeline_order(pipeline(schedule, ranks), microbatches))


@pytest.mark.parametrize(
    ("schedule", "ranks", "rounds"), product(("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"), (2, 3, 8), (1, 2, 5))
)
def test_the_bubble_is_the_textbooks(schedule: str, ranks: int, rounds: int) -> None:
    """(p - 1) / (v m + p - 1), where B is kept whole (Narayanan et al. 2021, section 2.2)."""
    microbatches, order = 2 * ranks * rounds, pipeline_order(pipeline(schedule, ranks))
    share = bubble_share(timeline_of(schedule, ranks, microbatches))
    assert share == pytest.approx((ranks - 1) / (len(held_stages(order)[0]) * microbatches + ranks - 1))


@pytest.mark.parametrize("ranks", (2, 4))
def test_two_stages_per_rank_wait_less_and_split_backward_passes_less_still(ranks: int) -> None:
    shares = {schedule: bubble_share(timeline_of(schedule, ranks, 4 * ranks)) for schedule in SCHEDULES}
    assert shares["Interleaved1F1B"] < 0.6 * shares["1F1B"]
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert 0 < shares[schedule] < 0.5 * shares["Interleaved1F1B"]


@pytest.mark.parametrize(("schedule", "ranks"), product(SCHEDULES, (2, 3, 4)))
def test_every_action_starts_as_soon_as_its_rank_is_free_and_its_inputs_are_there(schedule: str, ranks: int) -> None:
    order = pipeline_order(pipeline(schedule, ranks), 4 * ranks)
    timeline = simulate(order)
    assert {rank: [slot.action for slot in slots] for rank, slots in timeline.items()} == order
    ends = {slot.action: slot.end for slots in timeline.values() for slot in slots}
    for slots in timeline.values():
        free = 0
        for (stage, kind, microbatch), start, end in slots:
            inputs = {
                "F": [Action(stage - 1, "F", microbatch)],
                "W": [Action(stage, "I", microbatch)],
            }.get(kind, [Action(stage, "F", microbatch), *(Action(stage + 1, half, microbatch) for half in "BI")])
            assert start == max([free, *(ends.get(action, 0) for action in inputs)])
            assert end - start == (2 if kind == "B" else 1)
            free = end


def test_gpipe_takes_three_units_for_each_microbatch_and_hop() -> None:
    assert makespan(timeline_of("GPipe", 2, 4)) == (4 + 1) * 3
