"""Experts that are spread over ranks compute, train, load and save as those of one process do."""

from pathlib import Path

import pytest
from transformers import PretrainedConfig

from every_model import configuration_class, small_config
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.parallel.mesh import Layout
from layouts import Case, check_same, outcomes
from tiny import random_model, tiny_config

KINDS = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
TINY = ("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss")


def config_of(kind: str) -> PretrainedConfig:
    own = tiny_config(kind) if kind in TINY else small_config(configuration_class(kind))
    own.use_cache = False
    return own


def saved(kind: str, folder: Path) -> Path:
    random_model(config_of(kind), "eager").save_pretrained(folder)
    return folder


def spread(layout: Layout, accumulation: int = 1, **changes: object) -> Case:
    return Case(layout, accumulation, **changes)


RECOMPUTED = ActivationCheckpointConfig(mode="full")
BY_OPERATION = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
RING = {"context_parallel_rotate_method": "alltoall"}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_the_experts_of_one_process(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    [together] = outcomes(tmp_path, [Case(Layout(dp_shard=2, ep=2), 2)])
    check_same(together, alone)
