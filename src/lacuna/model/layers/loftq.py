"""Adapters that begin as a low-rank form of the quantisation error (LoftQ, arXiv 2310.08659)."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.lora import Lora
from lacuna.model.layers.quantized import quantized_modules
from lacuna.model.layers.wrapping import stored_parameter
from lacuna.parallel.fsdp import local, own_part


@torch.no_grad()
def initialize_from_quantization_error(
    model: nn.Module, slices: Mapping[str, Any], device: torch.device
) -> None:
    """Initialises the adapters of quantised layers, in place, by one round of LoftQ.

    `slices` are the tensors of the model's files. Where there is no error, adapters stay as they
    are, since factors that are all zero never learn.
    """
    for name, layer in sorted(quantized_modules(model).items()):
        if not isinstance(layer, Lora):
            continue
        weight = slices[_most_similar_name(f"{name}.weight", slices)][...].to(device).float()
        error = weight - layer.dense_weight(weight)
        if not error.any():
            continue
        with torch.random.fork_rng([error.device] if error.is_cuda else []):
            torch.manual_seed(0)
            wide = (error.mT if is_transposed(layer) else error) / layer.adapter_scale
            left, sizes, right = torch.svd_lowrank(wide, q=len(layer.lora_A), niter=8)
        factors = {"lora_A": (right * sizes.sqrt()).mT, "lora_B": left * sizes.sqrt()}
        for part, factor in factors.items():
            parameter = stored_parameter(layer, part)
            # Kernels differ in which factors of the same product they find, so that all ranks take
            # those of one.
            local(parameter).copy_(own_part(factor, parameter, source=0))


def _most_similar_name(name: str, keys: Iterable[str]) -> str:
    """The key that has the longest end in common with a name; how keys begin differs by file."""
    return max(keys, key=lambda key: len(os.path.commonprefix([key[::-1], name[::-1]])))
