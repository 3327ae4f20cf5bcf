"""Linear layers whose products are in 8-bit floats, and the gathering of their weights in these.

The products, their scales and their gradients are torchao's (`torchao.float8`); this module is
imported only where torchao is installed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_utils import amax_to_scale
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from lacuna.model.layers.casting import Cast
from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.wrapping import Place, Wrapper, stored_parameter, wrap
from lacuna.parallel.fsdp import local


class Float8(Wrapper):
    """A linear layer that casts inputs, weight and gradients to 8-bit floats when it multiplies.

    Its weight is stored, sharded and saved as without.

    Attributes:
        recipe: torchao's settings of the casts.
        products: torchao's settings of the three products of both passes.
    """

    place = Place.PRODUCT
    recipe: Float8LinearConfig
    products: Any
    weight: Tensor
    bias: Tensor | None

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output, in the dtype of `hidden` [..., in]."""
        weight = self.weight if is_transposed(self) else self.weight.t()
        result: Tensor = matmul_with_hp_or_float8_args.apply(
            hidden, weight, self.products, self.recipe
        )
        return result if self.bias is None else result + self.bias.to(result.dtype)


def wrap_layers(layers: Sequence[nn.Module], name: str, emulate: bool, pads: bool) -> None:
    """Has linear layers compute by torchao's recipe of this name, in place.

    `emulate` computes with float8's values in the products' own dtype. `pads` says that numbers of
    tokens need not be multiples of 16, as the hardware wants them.
    """
    recipe = replace(Float8LinearConfig.from_recipe_name(name), emulate=emulate, pad_inner_dim=pads)
    # It also has the compiler avoid a fault of Triton's, and knows the settings of the products.
    sample = convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=recipe)
    for layer in layers:
        wrap(layer, Float8, recipe=recipe, products=sample.linear_mm_config)


@torch.no_grad()
def gather_in_float8(model: nn.Module) -> list[Tensor]:
    """Has FSDP gather the weights of a filled and sharded model in float8, in place.

    They are cast before they are sent, by scales of whole weights. That is torchao's doing, whose
    functions FSDP finds as attributes of the shards; the parameters stay plain, so that optimizers
    and checkpoints know nothing of it. Weights that ranks have unequal shares of, and those that
    modules cast themselves, are gathered as they are. Returns what casts the others.
    """
    casters: list[Tensor] = []
    for layer in model.modules():
        if not isinstance(layer, Float8) or isinstance(layer, Cast):
            continue
        weight = stored_parameter(layer, "weight")
        if not isinstance(weight, DTensor) or weight.shape[0] % weight.device_mesh.shape[-1]:
            continue
        shard: Any = local(weight)
        dtype = layer.recipe.cast_config_weight.target_dtype
        caster = WeightWithDynamicFloat8CastTensor(shard, layer.products, dtype)
        shard.fsdp_pre_all_gather = caster.fsdp_pre_all_gather
        shard.fsdp_post_all_gather = caster.fsdp_post_all_gather
        casters.append(caster)
    return casters


@torch.no_grad()
def compute_scales(casters: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Computes the scales of all weights that are gathered in float8, with one exchange, in place.

    `group` are the ranks that have shards of the weights. Must follow each change of the weights.
    """
    norms = torch._foreach_norm([caster._tensor for caster in casters], torch.inf)
    largest = torch.stack(norms)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scales = amax_to_scale(largest, casters[0]._dtype)
    for caster, scale in zip(casters, scales.unbind(), strict=True):
        caster._precomputed_scale = scale
