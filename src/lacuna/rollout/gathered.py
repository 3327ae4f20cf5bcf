"""The weights of a model in training, made ready once for all forward passes of generating."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lacuna.model.layers.casting import Cast
from lacuna.parallel import tensor

# The modules whose hooks have layers work on a share of matrices and sequences.
_DIVIDING = ("torch.distributed.tensor", tensor.__name__)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within it, and within `inference`, every rank has all parameters of `model`.

    Forward passes exchange nothing then, so that ranks may make different numbers of them. Nor is
    sharding called in them: it would wait for streams, which no CUDA graph may do.
    """
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    hooks = [dict(table) for unit in units for table in _hooks_of(unit)]
    for unit in units:
        state = unit._get_fsdp_state()
        for table in _hooks_of(unit):
            own = [key for key, hook in table.items() if getattr(hook, "__self__", None) is state]
            for key in own:
                del table[key]
    try:
        with _undivided(model):
            yield
    finally:
        tables = [table for unit in units for table in _hooks_of(unit)]
        for table, before in zip(tables, hooks, strict=True):
            table.clear()
            table.update(before)
        for unit in units:
            unit.set_reshard_after_forward(bool(unit.frees_after_forward), recurse=False)


@contextmanager
def _undivided(model: nn.Module) -> Iterator[None]:
    """Within it matrices that tensor-parallel ranks divide are whole on each, in copies.

    Layers are then what they were before they were divided: they take whole sequences, of which
    ranks may have different ones.
    """
    stored: list[tuple[nn.Module, str, nn.Parameter]] = []
    tables = []
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, DTensor):
                stored.append((module, name, weight))
                module._parameters[name] = nn.Parameter(weight.full_tensor(), requires_grad=False)
        for table in _hooks_of(module):
            tables.append((table, dict(table)))
            for key, hook in list(table.items()):
                if getattr(hook, "func", hook).__module__.startswith(_DIVIDING):
                    del table[key]
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)
        for module, name, weight in stored:
            module._parameters[name] = weight


def _hooks_of(unit: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The tables of what is called before and after the forward passes of a module."""
    return unit._forward_pre_hooks, unit._forward_hooks


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """Within it, weights that modules cast whenever they read them are cast already.

    It takes the memory of a copy of these in less precision. What is sharded is left as it is.
    """
    stored: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            is_cast = isinstance(module, Cast) and isinstance(
                getattr(type(module), name, None), property
            )
            if weight is None or isinstance(weight, DTensor) or not is_cast:
                continue
            stored.append((module, name, weight))
            module._parameters[name] = nn.Parameter(getattr(module, name), requires_grad=False)
    try:
        yield
    finally:
        for module, name, weight in stored:
            module._parameters[name] = weight


@contextmanager
def looked_up_on(device: torch.device, model: PreTrainedModel) -> Iterator[None]:
    """Within it, an embedding that is kept in CPU memory is on `device`, in a copy.

    Each token of each step would wait for the CPU else, and no CUDA graph may do that.
    """
    embedding: Any = model.get_input_embeddings()
    look_up = vars(embedding).pop("forward", None)  # which `look_up_on_cpu` has put there
    if look_up is None:
        yield
        return
    stored = embedding.weight
    embedding.weight = nn.Parameter(stored.to(device), requires_grad=False)
    try:
        yield
    finally:
        embedding.weight = stored
        embedding.forward = look_up
