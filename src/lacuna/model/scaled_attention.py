"""Queries that grow with the logarithm of the keys they see, times a learned number of each head.

It is SSMax (Nakanishi, arXiv 2501.19399): softmax over ever more keys becomes flat, and a factor of
log n keeps it as peaked as it was. The number of each head is a parameter of transformers' own
attention modules, under the name `SCALE`, which models are given as they are made.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.config.attentions import SCALE, TRAINED, is_scaled
from lacuna.model.weights import stored_slices
from lacuna.parallel.partial_attention import Part

INITIAL = 0.3  # as in the code of softpick's authors


@cache
def scale_new_models() -> None:
    """Gives the models that are made from now on, if they are to have scaled attention, scales.

    transformers calls `post_init` at the end of the construction of every model, before it draws or
    loads weights.
    """
    post_init: Callable[[PreTrainedModel], None] = PreTrainedModel.post_init

    def with_scales(self: PreTrainedModel) -> None:
        _add_scales(self)
        post_init(self)

    PreTrainedModel.post_init = with_scales  # type: ignore[method-assign]


def _add_scales(model: PreTrainedModel) -> None:
    """Adds a scale to each attention of a model, in place, if its configuration asks for it."""
    noted = getattr(model.config, "attn_implementation", None)
    if not is_scaled(noted or str(model.config._attn_implementation).removeprefix(TRAINED)):
        return
    module: Any
    for module in model.modules():
        is_attention = "Attention" in type(module).__name__ and hasattr(module, "layer_idx")
        if is_attention and not hasattr(module, SCALE):
            heads = getattr(module, "num_heads", None) or module.config.num_attention_heads
            setattr(module, SCALE, nn.Parameter(torch.full((heads,), INITIAL)))


def begin_scales(model: nn.Module, source: str, home: torch.device) -> None:
    """Gives the scales of a sharded meta model, in place, memory and their first value.

    Files of softmax weights have none, so that they keep it. Raises `UserError` where they could
    not learn then, since only adapters are trained.
    """
    stored = any(key.endswith(SCALE) for key in stored_slices(source))
    for module in model.modules():
        scale = getattr(module, SCALE, None)
        if scale is None or not scale.is_meta:
            continue
        if not stored and not scale.requires_grad:
            raise UserError(
                f"lora.rank: {source} has no {SCALE}, which the model's attention needs, and with "
                "adapters it is not trained: train the whole model first, or choose an attention "
                "that is not scaled."
            )
        made = torch.empty_like(scale, device=home).fill_(INITIAL)
        setattr(module, SCALE, nn.Parameter(made, scale.requires_grad))


def scaled_queries(
    name: str, module: nn.Module, query: Tensor, parts: tuple[Part, ...], window: int | None
) -> Tensor:
    """Queries [B, heads, T, D] times their head's scale and log(n + 1), if they see n keys.

    They are the queries of `parts`, one behind the other. Raises `UserError` for a module that has
    no scale for each of its heads.
    """
    rows, heads, tokens, _ = query.shape
    scale: Any = getattr(module, SCALE, None)
    if scale is None or len(scale) != heads:
        raise UserError(
            f'model.attention: "{name}" cannot be had: {type(module).__name__} is not known to '
            "have a number of heads that stays: choose another model or attention."
        )
    seen = [keys_seen(part, rows, tokens // len(parts), window) for part in parts]
    logarithms = torch.log1p(torch.cat(seen, 1).to(torch.promote_types(query.dtype, torch.float32)))
    factors = scale.to(logarithms.dtype)[:, None] * logarithms[:, None]
    scaled: Tensor = query * factors.unsqueeze(-1)
    return scaled.to(query.dtype)


def keys_seen(part: Part, rows: int, queries: int, window: int | None) -> Tensor:
    """How many keys each of a row's `queries` sees: int32 [rows, queries]."""
    tokens = torch.arange(rows * queries, dtype=torch.int32, device=part.cu_q.device)
    end = torch.searchsorted(part.cu_q, tokens, right=True)
    count = part.cu_k[end] - part.cu_k[end - 1]
    if part.causal:
        count = count - (part.cu_q[end] - tokens) + 1
    return count.clamp(0, window).view(rows, queries)
