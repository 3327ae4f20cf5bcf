"""The head is computed for the tokens of a rank's share that are trained, known on the host."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lacuna.data import Batch
from lacuna.data.packing import IGNORED
from lacuna.model.inputs import prepare_inputs, trained_places
from lacuna.parallel.context import shard_sequence
from lacuna.parallel.mesh import Layout
from policies import batch_of
from tiny import CPU, mesh_of, run_ranks

LENGTH = 16
LABELS = torch.arange(2 * LENGTH).view(2, LENGTH)
LABELS = LABELS.masked_fill(LABELS % 5 > 1, IGNORED)
BATCH = Batch(
    {
        "input_ids": torch.arange(2 * LENGTH).view(2, LENGTH),
        "labels": LABELS,
        "position_ids": torch.arange(LENGTH).expand(2, LENGTH),
        "real": torch.ones(2, LENGTH, dtype=torch.bool),
    },
    {},
    torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
    LENGTH,
)


def test_places_are_those_of_labels_and_of_prompts_that_are_learnt() -> None:
    batch = batch_of([([5, 6, 7], [8, 9]), ([3], [4])])
    labels = batch.columns["labels"]
    assert labels.tolist() == [[IGNORED, IGNORED, 8, 9, IGNORED, 4, IGNORED, IGNORED, IGNORED]]
    inputs = prepare_inputs(batch, "sdpa", CPU)
    assert inputs.places.tolist() == [2, 3, 5] and inputs.places.dtype == torch.int64
    prompts = torch.full_like(labels, IGNORED).index_fill(1, torch.tensor([0, 1]), 1)
    learnt = replace(batch, columns=batch.columns | {"prompt_labels": prompts})
    assert prepare_inputs(learnt, "sdpa", CPU).places.tolist() == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(("ignored", "count"), [(0, None), (6, None), (7, 93), (99, 1), (100, 0)])
def test_rows_with_few_tokens_to_leave_out_are_computed_whole(
    ignored: int, count: int | None
) -> None:
    labels = torch.arange(100).masked_fill(torch.arange(100) < ignored, IGNORED)
    places = trained_places({"labels": labels.view(4, 25)})
    assert (None if places is None else len(places)) == count


def shares(layout: Layout, attention: str, gather: bool) -> list[Tensor]:
    """A rank's columns, and where they are trained."""
    inputs = prepare_inputs(BATCH, attention, CPU, mesh_of(layout), gather)
    return [inputs.arguments["input_ids"], inputs.columns["labels"], inputs.places]


def test_ranks_know_the_places_of_their_share() -> None:
    for layout, gather in (
        (Layout(cp=2), False),
        (Layout(tp=2), False),
        (Layout(tp=2), True),
    ):
        for rank, (ids, labels, places) in enumerate(run_ranks(2, shares, layout, "sdpa", gather)):
            own = shard_sequence(LABELS, 1, layout.cp, rank) if layout.cp > 1 else LABELS
            if layout.tp > 1:
                assert torch.equal(ids, BATCH.columns["input_ids"].chunk(2, 1)[rank])
                own = own if gather else own.chunk(2, 1)[rank]
            assert torch.equal(labels, own)
            assert torch.equal(places, (own.flatten() != IGNORED).nonzero().flatten())
            assert labels.is_contiguous() and ids.is_contiguous()
