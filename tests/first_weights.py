"""First weights beside those that a model's own code draws."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from lacuna.config.adapters import LoraConfig
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.model.architecture import meta_model
from lacuna.model.layers.lora import trained_names
from lacuna.model.weights import fill_model
from tiny import CPU


def otherwise(own: Tensor, ours: Tensor) -> bool:
    """Whether a tensor is not what transformers makes, or not drawn from the same distribution."""
    if own.shape != ours.shape or own.dtype != ours.dtype:
        return True
    if torch.equal(own, ours):
        return False
    if (
        not own.is_floating_point()
        or not own.is_contiguous()
        or own.std() == 0
        or not ours.isfinite().all()
    ):
        return True
    wide = own.double().std()
    few = own.numel() ** -0.5
    return bool(
        abs(ours.double().std() / wide - 1) > 6 * few
        or abs(ours.double().mean() - own.double().mean()) > 8 * wide * few
    )


def drawn_otherwise(model_config: PretrainedConfig) -> list[str]:
    """The tensors of a model that are not drawn as its own code draws them."""
    torch.manual_seed(1)
    own = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model = meta_model(model_config, "eager", torch.float32)
    source = ModelConfig(config="any")
    fill_model(model, trained_names(model), source, LoraConfig(), TrainingConfig(), CPU, fill=True)
    expected = own.state_dict() | dict(own.named_buffers())
    found = model.state_dict() | dict(model.named_buffers())
    assert found.keys() == expected.keys()
    wrong = [
        name
        for name in expected
        if expected[name].numel() > 8 and otherwise(expected[name], found[name])
    ]
    return wrong
