"""What a step trains on is fixed by the global batch; how it is cut follows from the ranks."""

import pytest

from lacuna.config import UserError
from lacuna.config.machine import ParallelismConfig
from lacuna.config.optimizers import OptimizerConfig
from lacuna.config.sections import TrainingConfig
from lacuna.data import BatchSizes
from lacuna.parallel.batch import resolve_batch
from lacuna.parallel.mesh import Layout


def planned(ranks: int, saved: int | None = None, **training: int) -> BatchSizes:
    return resolve_batch(
        TrainingConfig(**training),
        ParallelismConfig(),
        OptimizerConfig(),
        Layout(ranks),
        saved,
        folder="outputs/run",
    )


def test_the_global_batch_follows_from_the_parts() -> None:
    assert planned(1, batch_size=4) == BatchSizes(4, 1, 4)
    assert planned(2, batch_size=4, gradient_accumulation_steps=3) == BatchSizes(4, 3, 24)


def test_accumulation_follows_from_the_global_batch() -> None:
    assert planned(2, batch_size=4, global_batch_size=32) == BatchSizes(4, 4, 32)
    assert planned(4, batch_size=4, global_batch_size=32) == BatchSizes(4, 2, 32)
    assert planned(
        8, batch_size=4, global_batch_size=32, gradient_accumulation_steps=1
    ) == BatchSizes(4, 1, 32)


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"training\.global_batch_size: 12 is no multiple .* 4 × 2 = 8"
    ):
        planned(2, batch_size=4, global_batch_size=12)


def test_parts_that_contradict_the_global_batch_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"training\.gradient_accumulation_steps: 2 does not fit .* = 4: give only one",
    ):
        planned(2, batch_size=4, global_batch_size=32, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("ranks", "micro", "expected"),
    [
        (2, 4, BatchSizes(4, 2, 16)),
        (8, 4, BatchSizes(2, 1, 16)),  # only 2 sequences are left for each rank
        (16, 4, BatchSizes(1, 1, 16)),
        (2, 3, BatchSizes(2, 4, 16)),  # 8 sequences a rank are no multiple of 3
        (1, 32, BatchSizes(16, 1, 16)),
    ],
)
def test_a_resumed_run_keeps_its_global_batch_on_other_ranks(
    ranks: int, micro: int, expected: BatchSizes
) -> None:
    assert planned(ranks, saved=16, batch_size=micro) == expected


def test_a_resumed_run_ignores_accumulation_but_not_another_global_batch() -> None:
    assert planned(2, saved=16, batch_size=4, gradient_accumulation_steps=7) == BatchSizes(4, 2, 16)
    assert planned(2, saved=16, batch_size=4, global_batch_size=16) == BatchSizes(4, 2, 16)
    with pytest.raises(
        UserError, match=r"global_batch_size: 32 is asked for.*'outputs/run' was started with 16"
    ):
        planned(2, saved=16, batch_size=4, global_batch_size=32)


def test_ranks_that_cannot_share_a_saved_global_batch_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"global_batch_size = 16, which 3 data-parallel ranks cannot share evenly"
    ):
        planned(3, saved=16, batch_size=4)
