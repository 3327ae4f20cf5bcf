"""Processes of tests find all that they need imported, and no garbage to look through."""

import gc

from tiny import run_ranks


def state_of_garbage() -> tuple[bool, int]:
    return gc.isenabled(), gc.get_freeze_count()


def test_ranks_begin_with_everything_imported() -> None:
    """What the server of processes fails to import it leaves out without a word."""
    [(is_collected, frozen)] = run_ranks(1, state_of_garbage)
    assert is_collected
    assert frozen > 100_000
