"""Layers are compiled only where their compiler can compute them."""

import pytest
import torch

from lacuna.model.checks import reason_not_to_compile
from tiny import random_model, tiny_config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2_moe", "deepseek_v3"])
def test_grouped_products_of_experts_are_compiled_on_a_gpu_in_bfloat16_only(
    architecture: str, device: str, dtype: torch.dtype
) -> None:
    config = random_model(tiny_config(architecture)).config
    against = reason_not_to_compile(config, 1, dtype, device)
    fails = architecture != "llama" and device == "cuda" and dtype != torch.bfloat16
    assert (against is not None) == fails


def test_layers_that_count_the_choices_of_routers_in_pieces_are_not_compiled() -> None:
    config = tiny_config("qwen2_moe")
    assert reason_not_to_compile(config, 2, torch.bfloat16, "cuda") is not None
    assert reason_not_to_compile(config, 1, torch.bfloat16, "cuda") is None
