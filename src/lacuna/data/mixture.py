"""The order of documents: a function of seed and position alone, computed where it is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lacuna.config import explained

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = np.arange(6, dtype=np.uint64) * _GOLDEN


def mix(values: np.ndarray) -> np.ndarray:
    """Turns uint64 counters into values that look independent.

    It is the finaliser of SplitMix64 (Steele, 2014).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def random_key(*parts: int) -> int:
    """One 64-bit key from a few integers, so that every use of randomness has its own stream."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


@lru_cache(maxsize=2)
def shuffled(size: int, key: int | None, *parts: int) -> np.ndarray:
    """The numbers below `size`, int64 [size], in an order of the key's and the parts' own.

    Without a key they stay as they are.
    """
    own_key = None if key is None else random_key(key, *parts)
    return Pool(size, own_key).locate(np.arange(size))


@dataclass(frozen=True)
class Pool:
    """Documents that share their passes: those of one source, or of several without weights.

    Args:
        size: how many they are; of a stream, its parts.
        key: a `random_key`; None keeps their own order.
    """

    size: int
    key: int | None

    def locate(self, ordinals: np.ndarray) -> np.ndarray:
        """The document, int64 [n], at each ordinal of the endless order.

        All documents are passed over again and again; every epoch has its own permutation, which is
        never stored: a Feistel network over the next power of four, walked until it lands inside
        (Black and Rogaway 2002).
        """
        epochs, places = np.divmod(ordinals.astype(np.uint64), np.uint64(self.size))
        if self.key is None:
            return places.astype(np.int64)
        keys = mix(np.uint64(self.key) + epochs * _GOLDEN)
        half = np.uint64(max(1, ((self.size - 1).bit_length() + 1) // 2))
        mask = (np.uint64(1) << half) - np.uint64(1)
        outside = np.arange(len(places))
        while outside.size:
            left, right, own = places[outside] >> half, places[outside] & mask, keys[outside]
            for salt in _ROUNDS:
                left, right = right, left ^ (mix(right + own + salt) & mask)
            places[outside] = (left << half) | right
            outside = outside[places[outside] >= self.size]
        return places.astype(np.int64)


@dataclass(frozen=True)
class Mixture:
    """Which pool each draw of each lane takes, and which of its documents.

    The documents are dealt to `lanes` independent sequences, so that a sequence can be made without
    the others. The c-th draw that lane l makes from a pool is that pool's ordinal c * lanes + l:
    together the lanes use every ordinal once. Pool p is drawn in proportion to `shares[p]`.
    """

    seed: int
    pools: tuple[Pool, ...]
    shares: tuple[float, ...]
    lanes: int

    def draw(
        self, lane: int, cursors: Sequence[int] | np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next `count` draws of one lane.

        Args:
            cursors: for each pool, the draws this lane has made from it.

        Returns:
            (pools, documents in them), int64 [count] each.
        """
        positions = np.arange(count, dtype=np.uint64) + np.uint64(sum(cursors))
        uniform = mix(positions * _GOLDEN + np.uint64(random_key(self.seed, lane))) >> np.uint64(11)
        bounds = np.cumsum(self.shares) / np.sum(self.shares) * 2.0**53
        choices = np.searchsorted(bounds[:-1], uniform, side="right")
        index = np.empty(count, dtype=np.int64)
        for choice, (pool, cursor) in enumerate(zip(self.pools, cursors, strict=True)):
            chosen = np.flatnonzero(choices == choice)
            index[chosen] = pool.locate((np.arange(len(chosen)) + cursor) * self.lanes + lane)
        return choices, index


def from_low_to_high(columns: Sequence[Sequence[Any]], name: str) -> np.ndarray:
    """The documents of all sources by the numbers in their columns of this name, int64 [documents].

    Raises `UserError` for values that are no numbers.
    """
    wrong = f"curriculum.difficulty_column, {name}"
    with explained(wrong, ValueError, mend="name a column of numbers"):
        values = [np.array(column, dtype=np.float64) for column in columns]
    return np.argsort(np.concatenate(values), kind="stable")
