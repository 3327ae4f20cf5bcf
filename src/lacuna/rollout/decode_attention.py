"""Attention of one new token of each sequence to keys and values that lie in pages."""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("lacuna::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    positions: Tensor,
    scaling: float,
    window: int,
) -> Tensor:
    """Writes the `key` and `value` of new tokens into pages, and attends to all up to them.

    `query` is [B, heads, D], `key` and `value` are [B, key heads, D]. `keys` and `values` are all
    pages [pages, key heads, size, D], of which `pages` [B, longest] are those of each sequence, and
    `positions` [B] are those of the new tokens. With a `window` above 0 a token sees only itself
    and the window - 1 before it. On a GPU it is a kernel of our own. Returns [B, heads, D].
    """
    if query.is_cuda:
        from lacuna.rollout.decode_kernel import attend_in_kernel

        return attend_in_kernel(query, key, value, keys, values, pages, positions, scaling, window)
    return plain_attention(query, key, value, keys, values, pages, positions, scaling, window)


@decode_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    positions: Tensor,
    scaling: float,
    window: int,
) -> Tensor:
    """The same as `decode_attention`, by torch: all pages are read up to the longest sequence's."""
    size = keys.shape[2]
    page = pages.gather(1, positions[:, None] // size)[:, 0].long()
    keys[page, :, positions % size] = key
    values[page, :, positions % size] = value
    used = pages[:, : int(positions.max()) // size + 1].long()
    all_keys, all_values = (one[used].transpose(1, 2).flatten(2, 3) for one in (keys, values))
    places = torch.arange(all_keys.shape[2], device=query.device)
    seen = places <= positions[:, None]
    if window:
        seen = seen & (places > positions[:, None] - window)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query[:, :, None],
        all_keys,
        all_values,
        seen[:, None, None],
        scale=scaling,
        enable_gqa=grouped,
    )[:, :, 0]
