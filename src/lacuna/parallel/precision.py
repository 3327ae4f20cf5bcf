"""The precision of a run: what weights are stored in, and what is computed in."""

import re

import torch
from torch import nn
from transformers import PreTrainedModel

from lacuna.config.adapters import LoraConfig, QuantizationConfig
from lacuna.config.sections import TrainingConfig


def named_dtype(name: str) -> torch.dtype:
    """The dtype that torch has under a name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def compute_dtype(training: TrainingConfig, device_type: str) -> torch.dtype:
    """The dtype of matrix products: what is asked for, else bfloat16 on a GPU, float32 on a CPU."""
    default = "bfloat16" if device_type == "cuda" else "float32"
    return named_dtype(training.mixed_precision_param or default)


def stored_dtype(training: TrainingConfig, lora: LoraConfig, device_type: str) -> torch.dtype:
    """The dtype that weights have in memory; that of products where adapters leave them frozen."""
    if lora.rank:
        return compute_dtype(training, device_type)
    return named_dtype(training.dtype)


def frozen_training(training: TrainingConfig, device_type: str) -> TrainingConfig:
    """The settings of a model that is not trained: its weights have the dtype of its products."""
    dtype = str(compute_dtype(training, device_type)).removeprefix("torch.")
    return training.model_copy(update={"dtype": dtype})


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """The names of the tensors that transformers keeps in float32 where the others have `dtype`.

    Its classes list them (`_keep_in_fp32_modules`, `_keep_in_fp32_modules_strict`) as patterns
    that may be found anywhere in a name. The biases of DeepSeek-V3's routers are among them.
    """
    plan = model._get_dtype_plan(dtype)
    patterns = [name.replace("*", ".*") for name, kept in plan.items() if kept == torch.float32]
    if not patterns:
        return set()
    listed = re.compile("|".join(patterns))
    return {name for name in model.state_dict() if listed.search(name)}


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Makes float32, in place, the tensors that transformers keeps so in a model of this dtype."""
    for name in kept_in_float32(model, dtype):
        path, _, own_name = name.rpartition(".")
        module = model.get_submodule(path)
        buffer = module._buffers.get(own_name)
        weight = module._parameters.get(own_name)
        if buffer is not None:
            module._buffers[own_name] = buffer.float()
        elif weight is not None:
            module._parameters[own_name] = nn.Parameter(weight.float(), weight.requires_grad)


def store_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives the weights of a model this dtype, in place, except those that stay float32.

    Buffers stay as they are, since rotations are float32 in any model.
    """
    kept = kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        if name not in kept:
            parameter.data = parameter.to(dtype)


def casts_by_itself(
    model: PreTrainedModel,
    training: TrainingConfig,
    quantization: QuantizationConfig,
    device_type: str,
) -> bool:
    """Whether a model's modules must cast their weights themselves.

    Sharding would cast all weights, also packed bytes and what transformers keeps in float32.
    """
    kept = kept_in_float32(model, compute_dtype(training, device_type))
    weights = {name for name, _ in model.named_parameters()}
    return quantization.base != "none" or not kept.isdisjoint(weights)
