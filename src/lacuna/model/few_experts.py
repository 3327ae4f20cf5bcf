"""A mixture of experts in small: as many experts as show how they are chosen, and narrow ones."""

import copy
import math
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from lacuna.config import UserError
from lacuna.model.architecture import meta_model
from lacuna.parallel.expert_stacks import experts_in, stacks_of

_FEW = 16
_IN_A_GROUP = 4  # some routers rank groups of experts by the two best of each
_NARROW = 128
_WIDTHS = ("intermediate", "ffn", "expert", "moe")  # in names of settings of experts' widths


class _Experts(NamedTuple):
    """The number of experts in the largest stack of a model, and the width within each."""

    number: int
    width: int


def most_experts(model_config: PretrainedConfig) -> int:
    """The largest number of experts in a stack of a model; 0 if it has no stacks."""
    return _largest(model_config).number


def _largest(model_config: PretrainedConfig) -> _Experts:
    own = copy.deepcopy(model_config)  # in which transformers notes the attention
    found = [_Experts(0, 0)]
    for stack in stacks_of([meta_model(own, "eager", torch.float32)]):
        width = stack.get_parameter("down_proj").shape[1 if stack.is_transposed else 2]
        found.append(_Experts(experts_in(stack), width))
    return max(found)


def with_few_experts(model_config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a configuration with few and narrow experts; itself where no setting makes it so.

    There are twice as many as are chosen for a token, at least, and some in each group.
    """
    own = _largest(model_config)
    settings = {
        name: value
        for name, value in vars(model_config.get_text_config()).items()
        if type(value) is int and value > 0
    }
    chosen = [
        value
        for name, value in settings.items()
        if ("top" in name or "per_tok" in name or name.endswith("_k")) and value < own.number
    ]
    groups = settings.get("n_group", 1)
    least = max(_FEW, 2 * max(chosen, default=1), _IN_A_GROUP * groups)
    wanted = _Experts(min(own.number, groups * math.ceil(least / groups)), min(own.width, _NARROW))
    if wanted == own:
        return model_config
    small = copy.deepcopy(model_config)
    for name, value in settings.items():
        if "expert" in name and value == own.number:
            setattr(small.get_text_config(), name, wanted.number)
        elif any(part in name for part in _WIDTHS) and value == own.width:
            setattr(small.get_text_config(), name, wanted.width)
    try:
        return small if _largest(small) == wanted else model_config
    except UserError:  # it insists on other numbers
        return model_config
