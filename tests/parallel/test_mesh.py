"""Degrees multiply to the processes there are, or the run is refused with the arithmetic."""

import pytest
import torch.distributed as dist

from lacuna.config import Config, UserError
from lacuna.config.machine import ParallelismConfig
from lacuna.parallel.mesh import Layout, build_mesh, resolve_layout
from tiny import run_ranks


def resolved(replicate: int, shard: int, processes: int) -> Layout:
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=replicate, data_parallel_shard_degree=shard
    )
    return resolve_layout(Config(parallelism=parallelism).parallelism, processes)


@pytest.mark.parametrize(
    ("replicate", "shard", "processes", "expected"),
    [
        (1, -1, 1, (1, 1)),
        (1, -1, 4, (1, 4)),
        (2, -1, 4, (2, 2)),
        (4, -1, 4, (4, 1)),
        (2, 3, 6, (2, 3)),
    ],
)
def test_the_rest_of_the_processes_share_the_model(
    replicate: int, shard: int, processes: int, expected: tuple[int, int]
) -> None:
    layout = resolved(replicate, shard, processes)
    assert (layout.dp_replicate, layout.dp_shard) == expected
    assert layout.data_parallel == processes


@pytest.mark.parametrize(
    ("replicate", "shard", "processes", "arithmetic"),
    [
        (2, 4, 4, "2 × 4 = 8"),
        (1, 2, 4, "1 × 2 = 2"),
        (3, -1, 4, "3 × 1 = 3"),
        (8, -1, 4, "8 × 1 = 8"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_arithmetic(
    replicate: int, shard: int, processes: int, arithmetic: str
) -> None:
    with pytest.raises(
        UserError,
        match=rf"data_parallel_shard_degree = {arithmetic}, but there are {processes} proc",
    ):
        resolved(replicate, shard, processes)


def groups() -> list[list[int]]:
    mesh = build_mesh(Layout(dp_replicate=2, dp_shard=2), "cpu")
    return [
        dist.get_process_group_ranks(mesh.layers[name].get_group())
        for name in ("dp_replicate", "fsdp")
    ]


def test_shards_of_one_copy_are_neighbours() -> None:
    assert run_ranks(4, groups) == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]
