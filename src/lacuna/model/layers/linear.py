"""Which parameters are matrices, and which linear layers are plain.

Adapters and quantisation are for plain layers alone.
"""

import copy
import inspect
import re
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from lacuna.model.layers.wrapping import Wrapper

PlainLinear = nn.Linear | Conv1D

# Names, and words in names, of parameters that are added, multiplied with, or looked up.
_NO_MATRICES = {
    *("bias", "log", "d", "scale", "mix", "pos", "position", "emb", "embed", "embedding"),
    *("bonus", "bounds", "l", "mimo", "r_k"),  # of fla's layers
}

_plain: dict[type[nn.Module], bool] = {nn.Linear: True, Conv1D: True}


def is_matrix(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether the parameter of this name in a module is one of its matrices, or a stack of these.

    Biases, scales, positions and rates of decaying states are no matrices, however many dimensions
    they have: those of experts are stacked, and state-space models have one for every state.
    """
    if parameter.ndim < 2 or isinstance(module, nn.Embedding):
        return False
    if isinstance(module, nn.Linear | Conv1D | _ConvNd):
        return True
    words = {name, *name.lower().split("_")}
    is_vector = sum(size > 1 for size in parameter.shape) < 2
    return not (is_vector or words & _NO_MATRICES or "Norm" in type(module).__name__)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module stores its weights as [in, out]."""
    return isinstance(module, Conv1D) or getattr(module, "is_transposed", False)


def is_plain_linear(module: nn.Module) -> TypeGuard[PlainLinear]:
    """Whether a module is a linear layer that only multiplies with its weight and adds its bias.

    Some of transformers' linear layers do more or less than that: routers, and products by groups
    of inputs. So one module of each class is tried.
    """
    if not isinstance(module, PlainLinear):
        return False
    if isinstance(module, Wrapper):  # which goes around plain ones only
        return True
    kind = type(module)
    if kind not in _plain:
        _plain[kind] = _computes_plainly(module)
    return _plain[kind]


@torch.no_grad()
def _computes_plainly(module: PlainLinear) -> bool:
    """Whether a copy of a module with other weights computes what a plain linear layer would."""
    tried = copy.deepcopy(module).to("meta").to_empty(device="cpu").float()
    for parameter in tried.parameters():
        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    weight = tried.weight.mT if is_transposed(module) else tried.weight
    hidden = torch.linspace(-1, 1, 6 * weight.shape[1]).view(2, 3, -1)
    expected = nn.functional.linear(hidden, weight, tried.bias)
    try:
        output = tried(hidden)
    except (RuntimeError, TypeError, ValueError):  # it takes other inputs
        return False
    same_kind = isinstance(output, Tensor) and output.shape == expected.shape
    return same_kind and torch.allclose(output, expected, rtol=1e-4, atol=1e-4)


def plain_linears(model: nn.Module) -> dict[str, PlainLinear]:
    """The plain linear layers that a model calls, by name.

    Those are left out whose weight the code around them reads itself (as Mamba's fused kernels do),
    since it would pass by whatever wraps them.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if is_plain_linear(module) and not reads_weight(model, name)
    }


def reads_weight(model: nn.Module, name: str) -> bool:
    """Whether the code of the module around reads the weight of the layer of this name itself."""
    path, _, own_name = name.rpartition(".")
    # mypy does not see that classes are hashable.
    return own_name in _read_weights(type(model.get_submodule(path)))  # type: ignore[arg-type]


@cache
def _read_weights(kind: type[nn.Module]) -> set[str]:
    """The names of the children whose weights the code of a kind of module reads itself.

    Reading only their dtype, device or shape does not count, nor do slices (BLOOM's, for old
    checkpoints), nor giving them their first values.
    """
    own = (
        one for one in kind.__mro__ if one.__module__.startswith(("transformers.models.", "fla."))
    )
    code = [
        inspect.getsource(function)
        for one in own
        for name, function in vars(one).items()
        if inspect.isfunction(function) and "init" not in name
    ]
    read = r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size)|\[)"
    return {child for one in code for child in re.findall(read, one)}
