"""Recomputing activations saves memory and changes no gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # registers its operation
from torch import Tensor

from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model import merged_attention  # noqa: F401, which defines an operation
from lacuna.model.architecture import decoder_layers
from lacuna.parallel.mesh import Layout
from lacuna.parallel.recompute import KEPT, PRODUCTS, recompute
from layouts import Case, check_same, outcomes
from tiny import random_model, tiny_config

OFFLOADED = ActivationCheckpointConfig(mode="full", offload=True)
FULL = ActivationCheckpointConfig(mode="full")
EVERY_SECOND = ActivationCheckpointConfig(mode="selective", selective_ac_option="2")
BY_OPERATION = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
BUDGET = ActivationCheckpointConfig(mode="memory_budget", memory_budget=0.2)


@pytest.fixture(scope="module", params=["llama_tied", "gpt2"])
def model_config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    dropout = {"resid_pdrop": 0.1} if request.param == "gpt2" else {}
    tiny_config(request.param, **dropout).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "adapters",
    [LoraConfig(rank=3), pytest.param(LoraConfig(), marks=pytest.mark.slow)],
    ids=["adapters", "whole"],
)
def test_a_recomputed_step_is_the_same_step(model_config: Path, adapters: LoraConfig) -> None:
    modes = (ActivationCheckpointConfig(), FULL, EVERY_SECOND, BY_OPERATION, OFFLOADED)
    plain, *recomputed = outcomes(
        model_config, [Case(Layout(1, 2), 2, recompute=mode, lora=adapters) for mode in modes]
    )
    for outcome in recomputed:
        check_same(outcome, plain)


@pytest.mark.slow
def test_a_recomputed_compiled_step_is_the_same_step(model_config: Path) -> None:
    modes = (FULL, EVERY_SECOND, BY_OPERATION, OFFLOADED, BUDGET)
    cases = [Case(Layout(), 2, recompute=mode, compiled=True) for mode in modes]
    plain, *recomputed = outcomes(model_config, [Case(Layout(), 2, compiled=True), *cases])
    for outcome in recomputed:
        check_same(outcome, plain)


def saved_bytes(settings: ActivationCheckpointConfig) -> int:
    """What a forward pass keeps for the backward pass, weights apart."""
    model = random_model(tiny_config("llama", num_hidden_layers=4)).train()
    recompute(decoder_layers(model), settings)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output: Any = model(input_ids=torch.arange(32)[None] % 60, use_cache=False)
    output.logits.sum().backward()
    return sum(kept.values())


def test_what_is_recomputed_is_not_kept() -> None:
    none, full, half = (
        saved_bytes(mode) for mode in (ActivationCheckpointConfig(), FULL, EVERY_SECOND)
    )
    assert full < half < none
    assert full < none / 3


def test_operations_whose_results_are_kept_are_those_of_torch_and_of_our_attentions() -> None:
    known = torch._C._dispatch_get_all_op_names()
    assert {*PRODUCTS} <= {*known}
    assert [name for name in KEPT if not any(each.startswith(name) for each in known)] == []
