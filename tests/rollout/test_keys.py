"""Keys that are made together are those that are made one by one."""

import pytest

from lacuna.data.mixture import random_key
from lacuna.rollout.keys import random_keys


@pytest.mark.parametrize("parts", range(1, 8))
def test_keys_made_together_are_those_made_alone(parts: int) -> None:
    uses = [[(7919 * use + part) ** 3 % 2**32 for part in range(parts)] for use in range(50)]
    uses += [[0] * parts, [2**32 - 1] * parts]
    assert random_keys(uses) == [random_key(*own) for own in uses]


def test_parts_may_be_larger_than_a_word() -> None:
    uses = [(2**40, 2, 5, 0), (1, 2, 5, 1)]
    assert random_keys(uses) == [random_key(*own) for own in uses]
    assert random_keys([]) == []
