"""Ranks that were started with different configurations stop with one message."""

import torch.distributed as dist

from lacuna.config import Config, UserError
from lacuna.config.sections import TrainingConfig
from lacuna.parallel.processes import Process, require_same_config
from tiny import CPU, run_ranks


def said(lengths: list[int]) -> str:
    rank, group = dist.get_rank(), dist.group.WORLD
    config = Config(training=TrainingConfig(seq_len=lengths[rank]))
    try:
        require_same_config(config, Process(rank, dist.get_world_size(), CPU, group, group))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_all_say_which_setting_differs_where() -> None:
    first, second, third = run_ranks(3, said, [64, 64, 128])
    assert first == second == third
    assert "training.seq_len is 64 on rank 0, 128 on rank 2" in first
    assert run_ranks(2, said, [64, 64]) == ["", ""]
