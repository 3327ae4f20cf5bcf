"""Adapters and quantisation are for layers that multiply with their weight, and for no others."""

import pytest
import torch
from torch import nn

from every_model import configuration_class, small_config
from lacuna.config import UserError
from lacuna.config.adapters import LoraConfig
from lacuna.model.architecture import meta_model
from lacuna.model.layers.linear import is_plain_linear
from lacuna.model.layers.lora import add_adapters
from lacuna.model.layers.quantized import quantize_layers, quantized_modules
from lacuna.model.layers.targets import find_targets
from tiny import tiny_config

ODD = {
    "deepseek_v4": "self_attn.o_a_proj",
    "phimoe": "mlp.router",
    "llama4_text": "feed_forward.router",
}
"""Kinds of models with subclasses of linear layers that compute something else."""


def small(kind: str) -> nn.Module:
    return meta_model(small_config(configuration_class(kind)), None, torch.float32)


@pytest.mark.parametrize("kind", ODD)
def test_linear_layers_that_compute_something_else_get_neither(kind: str) -> None:
    model = small(kind)
    odd = [name for name, module in model.named_modules() if name.endswith(ODD[kind])]
    assert odd and all(isinstance(model.get_submodule(name), nn.Linear) for name in odd)
    assert {*odd}.isdisjoint(find_targets(model, LoraConfig(rank=2))[0])
    with pytest.raises(UserError, match="lora.targets.*matches no linear layer"):
        find_targets(model, LoraConfig(rank=2, targets=(odd[0],)))
    quantize_layers(model, "int8", [])
    assert {*odd}.isdisjoint(quantized_modules(model))


def test_a_class_of_its_own_that_computes_the_same_gets_adapters() -> None:
    model = meta_model(tiny_config("falcon"), "eager", torch.float32)
    layer = model.transformer.h[0].mlp.dense_h_to_4h
    assert type(layer) is not nn.Linear and is_plain_linear(layer)
    assert "transformer.h.0.mlp.dense_h_to_4h" in find_targets(model, LoraConfig(rank=2))[0]


def test_quantised_layers_get_adapters() -> None:
    model = meta_model(tiny_config("llama"), "eager", torch.float32)
    quantize_layers(model, "nf4", [])
    targets, _, _ = add_adapters(model, LoraConfig(rank=2), torch.float32)
    assert len(targets) == 14


READ = {
    "mamba": ("mixer.dt_proj", "mixer.out_proj"),
    "jamba": ("mamba.dt_proj",),
    "falcon_h1": ("mamba.out_proj",),
}
"""Kinds of models whose code reads the weights of some layers itself, on some device."""


@pytest.mark.parametrize("kind", READ)
def test_layers_whose_weight_the_model_reads_itself_get_neither(kind: str) -> None:
    model = small(kind)
    read = [name for name, _ in model.named_modules() if name.endswith(READ[kind])]
    assert len(read) >= len(READ[kind])
    targets = find_targets(model, LoraConfig(rank=2))[0]
    assert {*read}.isdisjoint(targets) and any(name.endswith("in_proj") for name in targets)
    with pytest.raises(UserError, match="lora.targets.*matches no linear layer"):
        find_targets(model, LoraConfig(rank=2, targets=(read[0],)))
    quantize_layers(model, "nf4", [])
    assert {*read}.isdisjoint(quantized_modules(model)) and quantized_modules(model)


def test_layers_of_which_only_the_dtype_or_slices_are_read_get_both() -> None:
    model = meta_model(tiny_config("bloom"), "eager", torch.float32)
    targets = find_targets(model, LoraConfig(rank=2))[0]
    assert "transformer.h.0.mlp.dense_4h_to_h" in targets
