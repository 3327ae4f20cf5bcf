"""The precision of a run: what weights are stored in, and what is computed in."""

import re
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lacuna.config import Config


def compute_dtype(config: Config, device_type: str) -> torch.dtype:
    """The dtype of matrix products: as asked, else bfloat16 on a GPU and float32 on a CPU."""
    default = "bfloat16" if device_type == "cuda" else "float32"
    return getattr(torch, config.training.mixed_precision_param or default)


def stored_dtype(config: Config, device_type: str) -> torch.dtype:
    """The dtype that weights have in memory, where adapters leave them frozen: that they are computed with."""
    return (
        compute_dtype(config, device_type)
        if config.lora.rank
        else getattr(torch, config.training.dtype)
    )


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


def casts_by_itself(model: PreTrainedModel, config: Config, device_type: str) -> bool:
    """Whether a model's modules must cast their weights, since sharding would cast all of them.

    Packed bytes are none to cast, nor is what transformers keeps in float32.
    """
    kept = kept_in_float32(model, compute_dtype(config, device_type))
    weights = {name for name, _ in model.named_parameters()}
    return config.quantization.base != "none" or not kept.isdisjoint(weights)


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Has a model of which nothing else casts weights compute in `dtype`, in place.

    Weights and gradients stay as they are. A module casts its weights wherever it uses them,
    which compiled code does between its other work, and needs no second copy of the model; an
    embedding casts what it has looked up. Packed weights are none to cast, nor is what
    transformers keeps in float32.
    """
    kept = kept_in_float32(model, dtype)
    for path, module in model.named_modules():
        weights = dict(module.named_parameters(recurse=False))
        if hasattr(type(module), "quantized") and weights["weight"].ndim == 1:
            del weights["weight"]
        own = tuple(
            name
            for name, one in weights.items()
            if one.is_floating_point() and one.dtype != dtype and f"{path}.{name}" not in kept
        )
        if own and isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _, __, found: found.to(dtype))
        elif own:
            module.__class__ = _casting(type(module), own, dtype)


@cache
def _casting(kind: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    """A kind of module whose weights of these names are cast when they are read, unless sharded, as FSDP reads them."""

    def cast(module: nn.Module, name: str) -> Tensor:
        weight = module._parameters[name]
        return weight if isinstance(weight, DTensor) else weight.to(dtype)

    return type(
        kind.__name__, (kind,), {name: property(partial(cast, name=name)) for name in names}
    )
