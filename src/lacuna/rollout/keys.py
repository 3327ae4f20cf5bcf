"""Keys of many uses of randomness at once."""

from collections.abc import Sequence

import numpy as np

from lacuna.data.mixture import random_key

# The hash of numpy's SeedSequence, which numpy promises not to change: M. E. O'Neill's seed_seq
# with the multipliers of these beginnings.
_POOL = 4
_OF_WORDS = (0x43B0D7E5, 0x931E8875)
_OF_STATE = (0x8B51F9DD, 0x58F38DED)
_MIXED = (np.uint32(0xCA01F9DD), np.uint32(0x4973F715))
_SHIFT = np.uint32(16)


class _Hash:
    """Hashes words, uint32 [uses], each time with another constant."""

    def __init__(self, first: int, factor: int) -> None:
        self.constant = first
        self.factor = factor

    def __call__(self, words: np.ndarray) -> np.ndarray:
        words = words ^ np.uint32(self.constant)
        self.constant = self.constant * self.factor % 2**32
        words = words * np.uint32(self.constant)
        return words ^ (words >> _SHIFT)


def random_keys(uses: Sequence[Sequence[int]]) -> list[int]:
    """The `random_key` of each use, all of which have equally many parts.

    A rollout has thousands, which one after the other take longer than to draw by them.
    """
    if not uses or max(map(max, uses)) >= 2**32:  # such a part is several words
        return [random_key(*parts) for parts in uses]
    words = [*np.array(uses, dtype=np.uint32).T]
    words += [np.zeros_like(words[0])] * (_POOL - len(words))
    hashed = _Hash(*_OF_WORDS)
    pool = [hashed(word) for word in words[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mixed(pool[target], hashed(pool[source]))
    for word in words[_POOL:]:
        pool = [_mixed(own, hashed(word)) for own in pool]
    finish = _Hash(*_OF_STATE)
    low, high = (finish(own).astype(np.uint64) for own in pool[:2])
    keys: list[int] = (low | high << np.uint64(32)).tolist()
    return keys


def _mixed(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    product: np.ndarray = one * _MIXED[0] - other * _MIXED[1]
    mixed: np.ndarray = product ^ (product >> _SHIFT)
    return mixed
