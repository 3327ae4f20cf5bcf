"""Experts that are spread over ranks compute, train, load and save as those of one process do."""

from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from every_model import configuration_class, small_config
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.parallel.mesh import Layout
from layouts import Case, check_same, outcomes, pipelined
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


BY_OPERATION = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
RING = {"context_parallel_rotate_method": "alltoall"}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_the_experts_of_one_process(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    [together] = outcomes(tmp_path, [Case(Layout(dp_shard=2, ep=2), 2)])
    check_same(together, alone)


TWO = Layout(dp_shard=2, ep=2)
ON_TWO = {
    "ZeRO-1": Case(TWO, 2, zero_stage=1),
    "ZeRO-2": Case(TWO, 2, zero_stage=2),
    "offloaded": Case(TWO, 2, offload=True),
    "recomputed": Case(TWO, 2, recompute=ActivationCheckpointConfig(mode="full")),
    "by operation": Case(TWO, 2, recompute=BY_OPERATION),
    "cp": Case(Layout(cp=2, ep=2), 2),
    "ring": Case(Layout(cp=2, ring=True, ep=2), 2, parallelism=RING),
}
ON_FOUR = {
    "half": Case(Layout(dp_shard=4, ep=2)),
    "all": Case(Layout(dp_shard=4, ep=4)),
    "HSDP": Case(Layout(dp_replicate=2, dp_shard=2, ep=2)),
    "cp": Case(Layout(dp_shard=2, cp=2, ep=4), 2),
    "pp": pipelined(Layout(dp_shard=2, pp=2, ep=2), 4),
    "interleaved": pipelined(Layout(dp_shard=2, pp=2, ep=2), 4, "Interleaved1F1B"),
}


def test_any_layout_of_two_ranks_is_one_process(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    for one in outcomes(tmp_path, [*ON_TWO.values()]):
        check_same(one, alone)


def test_any_layout_of_four_ranks_is_one_process(tmp_path: Path) -> None:
    model = tiny_config("qwen3_moe", num_hidden_layers=4)
    random_model(model, "eager").save_pretrained(tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    for one in outcomes(tmp_path, [*ON_FOUR.values()]):
        check_same(one, alone)


def test_experts_that_no_token_of_any_rank_visits_have_no_gradients(tmp_path: Path) -> None:
    model = random_model(tiny_config("qwen3_moe"), "eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[2:] = layer.mlp.gate.weight[:2]  # ties: the first two are chosen
            layer.mlp.gate.weight[2:] *= 1 - 1e-3
            layer.mlp.gate.weight[:2] *= 0.0
            layer.post_attention_layernorm.weight.fill_(0.0)
    model.save_pretrained(tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    [together] = outcomes(tmp_path, [Case(TWO, 2)])
    check_same(together, alone)


def test_the_load_balancing_loss_is_that_of_one_process(tmp_path: Path) -> None:
    model = tiny_config("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    random_model(model, "eager").save_pretrained(tmp_path)
    [alone] = outcomes(tmp_path, [Case()])
    for one in outcomes(
        tmp_path, [Case(TWO), Case(Layout(cp=2, ring=True, ep=2), parallelism=RING)]
    ):
        check_same(one, alone)
