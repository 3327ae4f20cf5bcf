"""The order of documents: a function of the seed and the position alone, computed where it is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_FEISTEL_ROUNDS = 6


def mix(values: np.ndarray) -> np.ndarray:
    """Turn uint64 counters into independent-looking uint64 values (the finaliser of SplitMix64, Steele 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def random_key(*parts: int) -> int:
    """Derive one 64-bit key from a few integers, so that every use of randomness has its own stream."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def permute(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Map each index in [0, size) to its place in a random permutation, without ever storing the permutation.

    A Feistel network over the next power of four, walked until it lands inside (Black and Rogaway 2002).

    Args:
        index: int64 [n], values in [0, size).
        size: number of things permuted.
        keys: uint64 [n]; elements with equal keys belong to the same permutation.

    Returns:
        int64 [n], values in [0, size).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def feistel(value: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & mask
        for number in range(_FEISTEL_ROUNDS):
            salt = np.uint64(number * _GOLDEN % 2**64)
            left, right = right, left ^ (mix(right + keys + salt) & mask)
        return (left << half) | right

    result = feistel(index.astype(np.uint64), keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        result[outside] = feistel(result[outside], keys[outside])
        outside = outside[result[outside] >= size]
    return result.astype(np.int64)


@lru_cache(maxsize=2)
def shuffled(size: int, key: int | None, *parts: int) -> np.ndarray:
    """The numbers below `size`, int64 [size], in an order of the key's and parts' own; None leaves them as they are."""
    numbers = np.arange(size)
    return numbers if key is None else permute(numbers, size, np.full(size, random_key(key, *parts), dtype=np.uint64))


@dataclass(frozen=True)
class Pool:
    """Documents that are passed over as one: those of one local source, or of several that have no weights.

    Args:
        size: how many they are.
        key: a `random_key`; None keeps their own order.
    """

    size: int
    key: int | None

    def locate(self, ordinals: np.ndarray) -> np.ndarray:
        """The document, int64 [n], at each ordinal of the endless order.

        All documents are passed over again and again; every epoch has its own permutation.
        """
        epochs, index = np.divmod(ordinals, self.size)
        if self.key is None:
            return index
        return permute(index, self.size, mix(np.uint64(self.key) + epochs.astype(np.uint64) * np.uint64(_GOLDEN)))


@dataclass(frozen=True)
class Mixture:
    """Which pool each draw of each lane takes, and which of its documents.

    The documents are dealt to `lanes` independent sequences, so that a sequence can be made without the others.
    The c-th draw that lane l makes from a pool is that pool's ordinal c * lanes + l: together the lanes use every
    ordinal once. Pool p is drawn in proportion to `shares[p]`.
    """

    seed: int
    pools: tuple[Pool, ...]
    shares: tuple[float, ...]
    lanes: int

    def draw(self, lane: int, cursors: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next `count` draws of one lane.

        Args:
            cursors: for each pool, the draws this lane has made from it.

        Returns:
            (pools, documents in them), int64 [count] each.
        """
        positions = np.arange(count, dtype=np.uint64) + np.uint64(sum(cursors))
        uniform = mix(positions * np.uint64(_GOLDEN) + np.uint64(random_key(self.seed, lane))) >> np.uint64(11)
        bounds = np.cumsum(self.shares) / np.sum(self.shares) * 2.0**53
        choices = np.searchsorted(bounds[:-1], uniform, side="right")
        index = np.empty(count, dtype=np.int64)
        for choice, (pool, cursor) in enumerate(zip(self.pools, cursors, strict=True)):
            chosen = np.flatnonzero(choices == choice)
            index[chosen] = pool.locate((np.arange(len(chosen)) + cursor) * self.lanes + lane)
        return choices, index
