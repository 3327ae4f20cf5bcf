"""Failures of one rank while training, of which all ranks learn at once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from lacuna.config import OutageError, UserError
from lacuna.config.machine import CommConfig
from lacuna.data import Batch, Loader
from lacuna.model.build import BuiltModel


class DataError(OutageError, UserError):
    """A mistake in data that a step needs; nothing of that step has been done yet."""

    way_on = (
        "Files that are mended are other data: a new run begins with the weights that are saved "
        "by checkpoint.initial_load_path."
    )


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


def read_alike(
    next_step: Callable[[BuiltModel, Loader], Sequence[Batch]],
    policy: BuiltModel,
    source: Loader,
    comm: CommConfig,
) -> Sequence[Batch]:
    """The batches of `next_step`, unless a rank meets a mistake in its data.

    Then it raises `DataError` on all ranks, and the source is as it was before. All ranks must call
    it. They tell each other at every step, by a few bytes that no GPU waits for.
    """
    before = source.state_dict()
    batches: Sequence[Batch] = ()
    mistake = None
    try:
        batches = next_step(policy, source)
    except UserError as error:
        mistake = error
    met = torch.tensor(mistake is not None, dtype=torch.int)
    group = _group(comm.init_timeout_seconds, dist.group.WORLD)
    dist.all_reduce(met, group=group)
    if met:
        source.load_state_dict(before)
        of_ranks: list[UserError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mistake, group=group)
        first = next(filter(None, of_ranks))
        raise DataError(f"{str(first).rstrip('.')}.")
    return batches


@cache
def _group(seconds: int, _: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group for these news alone, as long as the process is in the same group of all ranks.

    Its ranks wait so long for each other in the first step, and from then on as long as in others
    for training: a rank that does not come is to be missed soon.
    """
    group: dist.ProcessGroup | None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return group
