"""A mixture of experts in small: as many experts as show how they are chosen, and no more."""

import copy
import math

import torch
from transformers import PretrainedConfig

from lacuna.config import UserError
from lacuna.model.architecture import meta_model
from lacuna.parallel.expert_stacks import experts_in, stacks_of

_FEW = 16
_IN_A_GROUP = 4  # some routers rank groups of experts by the two best of each


def most_experts(model_config: PretrainedConfig) -> int:
    """The largest number of experts in a stack of a model; 0 if it has no stacks."""
    own = copy.deepcopy(model_config)  # in which transformers notes the attention
    model = meta_model(own, "eager", torch.float32)
    return max(map(experts_in, stacks_of([model])), default=0)


def with_few_experts(model_config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a configuration with few experts; itself where these are few, or no such setting.

    There are twice as many as are chosen for a token, at least, and some in each group.
    """
    count = most_experts(model_config)
    settings = {
        name: value
        for name, value in vars(model_config.get_text_config()).items()
        if type(value) is int and value > 0
    }
    chosen = [
        value
        for name, value in settings.items()
        if ("top" in name or "per_tok" in name or name.endswith("_k")) and value < count
    ]
    groups = settings.get("n_group", 1)
    least = max(_FEW, 2 * max(chosen, default=1), _IN_A_GROUP * groups)
    few = groups * math.ceil(least / groups)
    if few >= count:
        return model_config
    fewer = copy.deepcopy(model_config)
    for name, value in settings.items():
        if "expert" in name and value == count:
            setattr(fewer.get_text_config(), name, few)
    try:
        return fewer if most_experts(fewer) == few else model_config
    except UserError:  # it insists on another number
        return model_config
