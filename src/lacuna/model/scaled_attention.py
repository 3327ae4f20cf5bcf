"""Queries that grow with the logarithm of the keys they see, times a learned number of each head.

It is SSMax (Nakanishi, arXiv 2501.19399): softmax over ever more keys becomes flat, and a factor of
log n keeps it as peaked as it was.
"""

import torch
from torch import Tensor, nn

from lacuna.config.attentions import SCALE
from lacuna.model.learned_attention import number_of
from lacuna.parallel.partial_attention import Part


def scaled_queries(
    name: str, module: nn.Module, query: Tensor, parts: tuple[Part, ...], window: int | None
) -> Tensor:
    """Queries [B, heads, T, D] times their head's scale and log(n + 1), if they see n keys.

    They are the queries of `parts`, one behind the other. Raises `UserError` for a module that has
    no scale for each of its heads.
    """
    rows, heads, tokens, _ = query.shape
    scale = number_of(name, SCALE, module, heads)
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
