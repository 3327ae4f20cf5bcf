"""Failures of what replies to completions and judges them, of which all ranks learn at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lacuna.config import OutageError, UserError


@contextmanager
def raised_on_all(exchange: dist.ProcessGroup | None) -> Iterator[None]:
    """Within it one rank may fail: at its end the first failure is raised on every rank.

    All ranks must enter it, and do nothing in it that others wait for.
    """
    failure = None
    try:
        yield
    except (OutageError, UserError) as error:
        failure = error
    of_ranks: list[Exception | None] = [failure] * dist.get_world_size()
    if len(of_ranks) > 1:
        dist.all_gather_object(of_ranks, failure, group=exchange)
    for first in filter(None, of_ranks):
        raise first
