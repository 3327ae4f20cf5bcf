"""Adapters that begin as the low-rank part of what quantisation took (LoftQ, arXiv 2310.08659)."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.lora import Lora
from lacuna.model.layers.quantized import quantized_modules
from lacuna.parallel.fsdp import local, own_part


@torch.no_grad()
def initialize_from_quantization_error(
    model: nn.Module, slices: Mapping[str, Any], device: torch.device
) -> None:
    """Has the adapters of quantised layers begin like that, in place, by one round of the method.

    `slices` is what the model's files hold. Where nothing was taken, they stay as they are, since
    zeros never learn.
    """
    for name, layer in sorted(quantized_modules(model).items()):
        if not isinstance(layer, Lora):
            continue
        weight = slices[_alike(f"{name}.weight", slices)][...].to(device).float()
        error = weight - layer.dense_weight(weight)
        if not error.any():
            continue
        with torch.random.fork_rng([error.device] if error.is_cuda else []):
            torch.manual_seed(0)
            wide = (error.mT if is_transposed(layer) else error) / layer.adapter_scale
            left, sizes, right = torch.svd_lowrank(wide, q=len(layer.lora_A), niter=8)
        factors = {"lora_A": (right * sizes.sqrt()).mT, "lora_B": left * sizes.sqrt()}
        for part, factor in factors.items():
            parameter = layer._parameters[part]
            # Which factors of a product are found is for kernels to say, so that all take those of
            # one rank.
            local(parameter).copy_(own_part(factor, parameter, source=0))


def _alike(name: str, keys: Iterable[str]) -> str:
    """The one of the `keys` that shares most of its end with a name.

    How they begin differs between files.
    """
    return max(keys, key=lambda key: len(os.path.commonprefix([key[::-1], name[::-1]])))
