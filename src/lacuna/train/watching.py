"""What the host does in a pass that no graph does again: it waits for numbers, and draws some."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def waits_of_host() -> Iterator[list[str]]:
    """Within it, notes where the host waits for a number of the GPU."""
    waits: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in said:
        if "synchronizing CUDA" in str(one.message):
            waits.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def draws_of_host() -> tuple[Any, ...]:
    """How far the CPU's random numbers have been drawn."""
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), repr(np.random.get_state()), of_torch
