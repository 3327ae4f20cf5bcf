"""What rows are like follows from several sections at once."""

import pytest

from lacuna.config import Config
from lacuna.config.documents import PackingConfig
from lacuna.config.machine import ParallelismConfig
from lacuna.config.sections import JobConfig


@pytest.mark.parametrize(
    ("task", "packing", "mode"),
    [
        ("pretrain", {}, "concatenate"),
        ("sft", {}, "best_fit"),
        ("preference", {}, "best_fit"),
        ("sft", {"mode": "none"}, "none"),
    ],
)
def test_texts_lie_end_to_end_and_all_others_are_kept_whole(
    task: str, packing: dict[str, str], mode: str
) -> None:
    config = Config(job=JobConfig(task=task), packing=PackingConfig(**packing))
    assert config.row_form.packing.mode == mode


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_ranks_that_are_not_data_parallel_share_rows(axis: str) -> None:
    spread = ParallelismConfig(**{f"{axis}_parallel_degree": 2})
    assert Config(parallelism=spread).row_form.is_shared
    assert not Config(
        parallelism=ParallelismConfig(data_parallel_shard_degree=2)
    ).row_form.is_shared
