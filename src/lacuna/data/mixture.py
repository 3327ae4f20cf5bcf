"""The order of documents: a function of the seed and the position alone, computed where it is needed."""

from dataclasses import dataclass

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_ALL_BITS = 0xFFFFFFFFFFFFFFFF
_FEISTEL_ROUNDS = 6


def mix(values: np.ndarray) -> np.ndarray:
    """Turn uint64 counters into independent-looking uint64 values (the finaliser of SplitMix64, Steele 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def random_key(*parts: int) -> int:
    """Derive one 64-bit key from a few integers, so that every use of randomness has its own stream."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = mix(state + np.uint64((part * _GOLDEN + _GOLDEN) & _ALL_BITS))
    return int(state[0])


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
            salt = np.uint64((number * _GOLDEN) & _ALL_BITS)
            left, right = right, left ^ (mix(right + keys + salt) & mask)
        return (left << half) | right

    result = feistel(index.astype(np.uint64), keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        result[outside] = feistel(result[outside], keys[outside])
        outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def shuffled_index(ordinals: np.ndarray, size: int, key: int | None) -> np.ndarray:
    """The document at each ordinal of a source of `size` documents that is passed over again and again.

    Args:
        ordinals: int64 [n], positions in the endless order.
        size: documents in the source.
        key: a `random_key`; None keeps the source's own order. Every epoch has its own permutation.

    Returns:
        int64 [n], indices in [0, size).
    """
    epochs, index = np.divmod(ordinals, size)
    if key is None:
        return index
    return permute(index, size, mix(np.uint64(key) + epochs.astype(np.uint64) * np.uint64(_GOLDEN)))


@dataclass(frozen=True)
class Mixture:
    """Which source each draw of each lane takes, and which of that source's documents.

    The documents are dealt to `lanes` independent sequences, so that a sequence can be made without the others.
    The c-th draw that lane l makes from a source is that source's ordinal c * lanes + l: together the lanes
    use every ordinal once.
    """

    seed: int
    probabilities: tuple[float, ...]
    lanes: int

    def draw(self, lane: int, first: int, cursors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The draws [first, first + count) of one lane.

        Args:
            cursors: int64 [sources], draws this lane has made from each source before `first`.

        Returns:
            (sources, ordinals), int64 [count] each.
        """
        if len(self.probabilities) == 1:
            counts = np.arange(count, dtype=np.int64) + cursors[0]
            return np.zeros(count, dtype=np.int64), counts * self.lanes + lane
        positions = np.arange(first, first + count, dtype=np.uint64) * np.uint64(_GOLDEN)
        uniform = mix(positions + np.uint64(random_key(self.seed, lane))) >> np.uint64(11)
        bounds = np.cumsum(self.probabilities) / np.sum(self.probabilities) * 2.0**53
        sources = np.searchsorted(bounds[:-1], uniform, side="right").astype(np.int64)
        counts = np.empty(count, dtype=np.int64)
        for source, cursor in enumerate(cursors):
            chosen = sources == source
            counts[chosen] = np.arange(chosen.sum(), dtype=np.int64) + cursor
        return sources, counts * self.lanes + lane


@dataclass(frozen=True)
class Pool:
    """Documents that are passed over as one: those of one local source, or of several that have no weights.

    Args:
        first_source: number of the first source.
        sizes: documents in each of the sources.
        key: a `random_key`; None keeps the sources' own order.
    """

    first_source: int
    sizes: tuple[int, ...]
    key: int | None

    def locate(self, ordinals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source and the document in it, int64 [n] each, at each ordinal of the endless order."""
        index = shuffled_index(ordinals, sum(self.sizes), self.key)
        starts = np.concatenate(([0], np.cumsum(self.sizes)))
        within = np.searchsorted(starts[1:], index, side="right")
        return self.first_source + within, index - starts[within]
