"""A Qwen3 with experts in torchtitan: its sizes, and the weights of transformers' stacks."""

import re
from typing import Any

from torch import Tensor
from torchtitan.models.moe import MoEArgs
from transformers import PretrainedConfig

_STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")


def mixture_sizes(config: PretrainedConfig, grouped: bool) -> dict[str, Any]:
    """torchtitan's arguments of experts that are chosen as in transformers, and balanced by none.

    `grouped` has it multiply by all experts at once, which it does in bfloat16 whatever the weights
    are; else it goes from expert to expert.
    """
    experts = MoEArgs(
        num_experts=config.num_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=config.norm_topk_prob,
        score_before_experts=False,
        top_k=config.num_experts_per_tok,
        use_grouped_mm=grouped,
        load_balance_coeff=None,
    )
    inner = config.moe_intermediate_size
    return {"moe_enabled": True, "moe_inter_dim": inner, "moe_args": experts}


def take_stacks(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Takes the stacks of experts out of transformers' state, named and cut as torchtitan's.

    Its adapter knows only files in which each expert has a name of its own.
    """
    taken: dict[str, Tensor] = {}
    for name in [*weights]:
        found = _STACK.fullmatch(name)
        if not found:
            continue
        layer, kind = found.groups()
        stack = weights.pop(name)
        place = f"layers.{layer}.moe.experts"
        if kind == "down_proj":
            taken[f"{place}.w2"] = stack
        else:
            taken[f"{place}.w1"], taken[f"{place}.w3"] = stack.chunk(2, dim=1)
    return taken
