"""Which linear layers of a model are plain: adapters and quantisation are for these alone."""

import copy
import inspect
import re
from functools import cache

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lacuna.model.layers.wrapping import Wrapper

_plain: dict[type[nn.Module], bool] = {nn.Linear: True, Conv1D: True}


def is_transposed(module: nn.Module) -> bool:
    """Whether a module has its weights as [in, out]."""
    return isinstance(module, Conv1D) or getattr(module, "is_transposed", False)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that multiplies with its weight, adds its bias, and no more.

    Some of transformers' do more, or less: routers, and products by groups of inputs. One of each
    class is tried.
    """
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    if isinstance(module, Wrapper):  # which goes around plain ones only
        return True
    kind = type(module)
    if kind not in _plain:
        _plain[kind] = _computes_plainly(module)
    return _plain[kind]


@torch.no_grad()
def _computes_plainly(module: nn.Linear | Conv1D) -> bool:
    tried = copy.deepcopy(module).to("meta").to_empty(device="cpu").float()
    for parameter in tried.parameters():
        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    weight = tried.weight.mT if is_transposed(module) else tried.weight
    hidden = torch.linspace(-1, 1, 6 * weight.shape[1]).view(2, 3, -1)
    expected = nn.functional.linear(hidden, weight, tried.bias)
    try:
        output = tried(hidden)
    except (RuntimeError, TypeError, ValueError):  # it wants other inputs
        return False
    same_kind = isinstance(output, Tensor) and output.shape == expected.shape
    return same_kind and torch.allclose(output, expected, rtol=1e-4, atol=1e-4)


def plain_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a model that it uses as such, by name.

    Not those whose weight the code around them reads itself (Mamba's fused kernels do), past
    whatever wraps them.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if is_plain_linear(module) and not reads_weight(model, name)
    }


def reads_weight(model: nn.Module, name: str) -> bool:
    """Whether the code of the module around reads the weight of the layer of this name itself."""
    place, _, own_name = name.rpartition(".")
    return own_name in _read_weights(type(model.get_submodule(place)))


@cache
def _read_weights(kind: type[nn.Module]) -> set[str]:
    """Of which children the code of a kind of module computes with the weights itself.

    Not where it only asks for their dtype or the like, nor for slices (BLOOM's, of old
    checkpoints).
    """
    own = (one for one in kind.__mro__ if one.__module__.startswith("transformers.models."))
    read = r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size)|\[)"
    return {child for one in own for child in re.findall(read, inspect.getsource(one))}
