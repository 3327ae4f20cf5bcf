"""What replaces a layer goes around it in one order, and comes off again."""

import pytest
import torch

from lacuna.config.adapters import LoraConfig
from lacuna.model.architecture import meta_model
from lacuna.model.layers.casting import compute_in
from lacuna.model.layers.lora import add_adapters, initialize_adapters
from lacuna.model.layers.quantized import Quantized, quantize_layers
from lacuna.model.layers.wrapping import merge, plain_tensor, wrap, wrapped_modules
from tiny import random_model, tiny_config


def test_an_adapter_goes_around_quantisation_and_a_cast_around_both() -> None:
    model = random_model(tiny_config("llama"))
    quantize_layers(model, "int8", [])
    add_adapters(model, LoraConfig(rank=2), torch.float32)
    compute_in(model, torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    assert type(layer).__name__ == "CastLoraQuantizedLinear"
    with pytest.raises(TypeError, match="Quantized does not go around CastLoraQuantizedLinear"):
        wrap(layer, Quantized, form="int8", dense_shape=(1, 1))


def test_what_is_around_an_adapter_already_is_not_put_below_it() -> None:
    model = meta_model(tiny_config("llama"), "eager", torch.float32)
    add_adapters(model, LoraConfig(rank=2), torch.float32)
    with pytest.raises(TypeError, match="Quantized does not go around LoraLinear"):
        quantize_layers(model, "nf4", [])


def test_a_model_that_is_merged_is_of_the_classes_that_it_was_of() -> None:
    model = random_model(tiny_config("llama"))
    classes = [type(module) for module in model.modules()]
    quantize_layers(model, "int8", [])
    add_adapters(model, LoraConfig(rank=2), torch.float32)
    initialize_adapters(model, 0)
    compute_in(model, torch.bfloat16)
    names = [name for name, _ in random_model(model.config).named_parameters()]
    weights = {name: plain_tensor(model, name) for name in names}
    merge(model)
    assert [type(module) for module in model.modules()] == classes
    assert not [*wrapped_modules(model)]
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
