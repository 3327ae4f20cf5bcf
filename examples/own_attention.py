"""An attention of your own, without a change to lacuna: softmax with one more key, which is empty.

In this folder: lacuna train RUN.toml --model.attention own_attention:SOFTMAX_PLUS_ONE
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lacuna.model.own_attention import OwnAttention
from lacuna.parallel.partial_attention import Part, visible


def softmax_plus_one(
    query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float, window: int | None
) -> Tensor:
    """Attention [B, T, heads, width] beside a key of score 0 and value 0, which takes weight."""
    rows, tokens, heads, _ = query.shape
    key, value = (one.repeat_interleave(heads // one.shape[2], dim=2) for one in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key).float() * scaling
    seen = visible(part, rows, tokens, window)[:, None]  # documents, causality and the window
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = pad(scores, (1, 0)).softmax(-1)[..., 1:]
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(value.dtype), value)


SOFTMAX_PLUS_ONE = OwnAttention(softmax_plus_one, documents=True, windows=True)
