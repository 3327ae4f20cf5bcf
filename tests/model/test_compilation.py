"""Layers are compiled only where their compiler can compute them."""

import pytest
import torch

from lacuna.model.checks import reason_not_to_compile
from tiny import random_model, tiny_config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2_moe", "deepseek_v3"])
def test_grouped_products_of_experts_are_compiled_on_a_gpu_in_bfloat16_only(
    architecture: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    config = random_model(tiny_config(architecture)).config
    against = reason_not_to_compile(config, 1, dtype, device)
    fails = architecture != "llama" and device == "cuda" and dtype != torch.bfloat16
    assert (against is not None) == fails


def test_layers_that_count_the_choices_of_routers_in_pieces_are_not_compiled() -> None:
    config = tiny_config("qwen2_moe")
    assert reason_not_to_compile(config, 2, torch.bfloat16, "cuda") is not None
    assert reason_not_to_compile(config, 1, torch.bfloat16, "cuda") is None


@pytest.mark.parametrize(("version", "compiles"), [("2.11.0+cu130", False), ("2.13.0+cpu", True)])
def test_grouped_products_in_float32_are_compiled_on_cpus_by_torch_2_13_alone(
    version: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    config = tiny_config("qwen3_moe")
    config._experts_implementation = "lacuna_grouped_mm"
    assert (reason_not_to_compile(config, 1, torch.float32, "cpu") is None) == compiles
    assert reason_not_to_compile(config, 1, torch.bfloat16, "cpu") is None
