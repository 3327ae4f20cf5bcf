"""Mixtures of experts in layers whose matrices are split: the blocks in which nothing is split."""

from torch import nn
from transformers import PretrainedConfig

from lacuna.parallel.tensor import EXPERTS, layer_styles, plan_of


def mixtures_in(layer: nn.Module, model_config: PretrainedConfig) -> dict[str, nn.Module]:
    """The blocks of a layer that are mixtures of experts: each works on tokens by themselves."""
    blocks = dict(layer.named_children())
    found = {name: blocks[name] for name in _mixtures(model_config) & blocks.keys()}
    return {name: block for name, block in found.items() if hasattr(block, "experts")}


def styles_beside(
    mixtures: dict[str, nn.Module], layer: nn.Module, model_config: PretrainedConfig
) -> dict[str, str]:
    """How the matrices of a layer are split that are not in its `mixtures`.

    Where the block is dense in this layer, it lacks what the plan names in mixtures beside experts.
    """
    parts = {name for name, _ in layer.named_modules()}
    found = {}
    for name, style in layer_styles(model_config).items():
        block = name.partition(".")[0]
        is_lacking = block in _mixtures(model_config) and name not in parts
        if block not in mixtures and not is_lacking:
            found[name] = style
    return found


def _mixtures(model_config: PretrainedConfig) -> set[str]:
    """The blocks of layers that are mixtures of experts, where they are not dense."""
    plan = plan_of(model_config).items()
    return {name.rpartition(".")[0] for name, style in plan if style == EXPERTS}
