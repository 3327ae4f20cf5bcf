"""The order of documents is a fair shuffle that can be computed from any position."""

import numpy as np
import pytest

from lacuna.data.mixture import Mixture, Pool, random_key


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_every_epoch_takes_each_document_once_in_an_order_of_its_own(size: int) -> None:
    first, second = Pool(size, random_key(1, size)).locate(np.arange(2 * size)).reshape(2, size)
    assert sorted(first) == sorted(second) == list(range(size))
    assert size < 16 or (first != second).any()


def test_every_place_is_equally_likely_for_every_document() -> None:
    size, epochs = 6, 6000
    index = Pool(size, random_key(3)).locate(np.arange(size * epochs)).reshape(epochs, size)
    for place in range(size):
        counts = np.bincount(index[:, place], minlength=size)
        assert np.abs(counts / epochs - 1 / size).max() < 0.03


def test_a_hundred_million_documents_need_no_memory() -> None:
    size = 10**8
    ordinals = np.array([0, 5, size - 1, size, 7 * size + 5])
    index = Pool(size, random_key(0)).locate(ordinals)
    assert len(set(index.tolist())) == 5 and index.max() < size


def in_order(count: int) -> tuple[Pool, ...]:
    """Pools whose documents are their ordinals."""
    return (Pool(10**9, key=None),) * count


def test_draws_do_not_depend_on_where_one_starts() -> None:
    mixture = Mixture(seed=5, pools=in_order(3), shares=(0.2, 0.5, 0.3), lanes=4)
    pools, ordinals = mixture.draw(lane=3, cursors=[0, 0, 0], count=200)
    cursors = np.bincount(pools[:77], minlength=3)
    later_pools, later_ordinals = mixture.draw(lane=3, cursors=cursors, count=123)
    assert np.array_equal(pools[77:], later_pools) and np.array_equal(ordinals[77:], later_ordinals)


def test_together_the_lanes_take_every_document_once_and_the_shares_hold() -> None:
    mixture = Mixture(seed=5, pools=in_order(2), shares=(3.0, 1.0), lanes=8)
    drawn = [mixture.draw(lane, [0, 0], 1000) for lane in range(8)]
    pools, ordinals = (np.concatenate(part) for part in zip(*drawn, strict=True))
    assert (pools == 0).mean() == pytest.approx(0.75, abs=0.02)
    for pool in range(2):
        taken = np.sort(ordinals[pools == pool])
        least = min((part[0] == pool).sum() for part in drawn)
        assert np.array_equal(taken[: least * 8], np.arange(least * 8))
