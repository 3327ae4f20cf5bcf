"""The precision of a run: what weights are stored in, and what is computed in."""

import re

import torch
from torch import nn
from transformers import PreTrainedModel

from lacuna.config.sections import LoraConfig, QuantizationConfig, TrainingConfig


def compute_dtype(training: TrainingConfig, device_type: str) -> torch.dtype:
    """The dtype of matrix products: as asked, else bfloat16 on a GPU and float32 on a CPU."""
    default = "bfloat16" if device_type == "cuda" else "float32"
    return getattr(torch, training.mixed_precision_param or default)


def stored_dtype(training: TrainingConfig, lora: LoraConfig, device_type: str) -> torch.dtype:
    """The dtype that weights have in memory: where adapters leave them frozen, that of products."""
    if lora.rank:
        return compute_dtype(training, device_type)
    return getattr(torch, training.dtype)


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """The names of the tensors that transformers keeps in float32 where the others have `dtype`.

    Its classes list them (`_keep_in_fp32_modules`, `_keep_in_fp32_modules_strict`) as patterns
    that are found anywhere in a name: the biases of DeepSeek-V3's routers, say.
    """
    plan = model._get_dtype_plan(dtype)
    patterns = [name.replace("*", ".*") for name, kept in plan.items() if kept == torch.float32]
    if not patterns:
        return set()
    listed = re.compile("|".join(patterns))
    return {name for name in model.state_dict() if listed.search(name)}


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Makes float32, in place, what transformers keeps so in a model of this dtype."""
    for name in kept_in_float32(model, dtype):
        place, _, own_name = name.rpartition(".")
        module = model.get_submodule(place)
        if own_name in module._buffers:
            module._buffers[own_name] = module._buffers[own_name].float()
        else:
            weight = module._parameters[own_name]
            module._parameters[own_name] = nn.Parameter(weight.float(), weight.requires_grad)


def store_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives the weights of a model this dtype, in place, but for those that stay float32.

    Not its buffers: rotations are float32 in any model.
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
    """Whether a model's modules must cast their weights, since sharding would cast all of them.

    Packed bytes are none to cast, nor is what transformers keeps in float32.
    """
    kept = kept_in_float32(model, compute_dtype(training, device_type))
    weights = {name for name, _ in model.named_parameters()}
    return quantization.base != "none" or not kept.isdisjoint(weights)
