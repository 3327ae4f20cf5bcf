"""Examples share rows without being cut, and long ones are treated as asked."""

from collections.abc import Sequence

import numpy as np
import pytest

from lacuna.config import UserError
from lacuna.config.documents import PackingConfig
from lacuna.data.document import Document
from lacuna.data.filling import best_fit, fill_rows

SPACE = 8


def test_rows_of_chat_like_lengths_are_full() -> None:
    lengths = (
        np.random.default_rng(0).lognormal(np.log(400), 0.8, 50_000).astype(np.int64).clip(1, 8192)
    )
    bins = best_fit(lengths, 8192)
    assert sorted(piece for bin_ in bins for piece in bin_) == list(range(len(lengths)))
    assert max(lengths[bin_].sum() for bin_ in bins) <= 8192
    assert lengths.sum() / (len(bins) * 8192) >= 0.999


@pytest.mark.parametrize("seed", range(20))
def test_each_piece_is_where_it_fits_best(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 20, 60)
    expected: list[list[int]] = []
    for piece in sorted(range(60), key=lambda piece: -lengths[piece]):
        room = [20 - sum(lengths[bin_]) for bin_ in expected]
        fitting = [number for number in range(len(expected)) if room[number] >= lengths[piece]]
        if not fitting:
            expected.append([])
        chosen = min(fitting, key=lambda number: room[number]) if fitting else -1
        expected[chosen].append(piece)
    fullness = [
        sorted(sum(lengths[bin_]) for bin_ in bins) for bins in (best_fit(lengths, 20), expected)
    ]
    assert fullness[0] == fullness[1]


NOT, YES = 0, 1
"""Tokens that are not trained, and such that are."""


def filled(documents: Sequence[list[int]], **packing: str) -> list[list[list[int]]]:
    made = [
        Document(np.array(tokens, dtype=np.int32), 0.0, trained=np.array(tokens) == YES)
        for tokens in documents
    ]
    lengths = np.array([len(tokens) for tokens in documents])
    rows = fill_rows(lengths, made.__getitem__, SPACE, PackingConfig(**packing))
    return [row.T.tolist() for row in rows]


DOCUMENTS = [[YES] * 3, [], [YES] * 19, [YES] * 5, [NOT] * 8 + [YES] * 3]


@pytest.mark.parametrize(
    ("long_examples", "rows"),
    [
        ("truncate", [[[2, 0, 8]], [[4, 0, 8]], [[3, 0, 5], [0, 0, 3]]]),
        ("drop", [[[3, 0, 5], [0, 0, 3]]]),
        (
            "split",
            [
                [[2, 0, 8]],
                [[2, 8, 16]],
                [[4, 0, 8]],
                [[3, 0, 5], [0, 0, 3]],
                [[2, 16, 19], [4, 8, 11]],
            ],
        ),
    ],
)
def test_long_examples_are_treated_as_asked(long_examples: str, rows: list) -> None:
    assert sorted(filled(DOCUMENTS, mode="best_fit", long_examples=long_examples)) == sorted(rows)


def test_without_packing_every_example_has_its_own_row() -> None:
    assert filled([[1] * 3, [1] * 5], mode="none") == [[[0, 0, 3]], [[1, 0, 5]]]


def test_what_is_left_without_a_trained_token_is_left_out() -> None:
    untrained = [NOT] * 9 + [YES]  # the label of the eighth is untrained as well
    assert filled([untrained, [1]], mode="best_fit") == [[[1, 0, 1]]]
    first_of_next = (
        [NOT] * 8 + [YES] + [NOT] * 3
    )  # a label of the first piece alone, which predicts it
    assert filled([first_of_next, [1] * 9], mode="best_fit", long_examples="split") == [
        [[0, 0, 8]],
        [[1, 0, 8]],
    ]
    with pytest.raises(
        UserError, match="packing.long_examples: none of 1 examples has a trained token within 8"
    ):
        filled([untrained], mode="best_fit")
