"""Attention of one new token of each sequence to keys and values that lie in pages."""

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL = torch.float8_e4m3fn
LARGEST = torch.finfo(SMALL).max
# A scale is at least this, also that of zeros.
SMALLEST = 1e-12


@torch.library.custom_op("lacuna::decode_attention", mutates_args=("keys", "values", "scales"))
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    pages: Tensor,
    positions: Tensor,
    scaling: float,
    window: int,
) -> Tensor:
    """Writes the `key` and `value` of new tokens into pages, and attends to all up to them.

    `query` is [B, heads, D], `key` and `value` are [B, key heads, D]. `keys` and `values` are all
    pages [pages, key heads, size, D], of which `pages` [B, longest] are those of each sequence, and
    `positions` [B] are those of the new tokens. Pages in float8 have `scales`, of keys and values
    [2, pages, key heads, size]. With a `window` above 0 a token sees only itself and the window - 1
    before it. On a GPU it is a kernel of our own. Returns [B, heads, D].
    """
    attend = plain_attention
    if query.is_cuda:
        from lacuna.rollout.decode_kernel import attend_in_kernel as attend
    where = (pages, positions, scaling, window)
    return attend(query, key, value, keys, values, scales, *where)


@decode_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    pages: Tensor,
    positions: Tensor,
    scaling: float,
    window: int,
) -> Tensor:
    """The same as `decode_attention`, by torch: all pages are read up to the longest sequence's."""
    size = keys.shape[2]
    page = pages.gather(1, positions[:, None] // size)[:, 0].long()
    store((key, value), (keys, values), scales, page, positions % size)
    used = pages[:, : int(positions.max()) // size + 1].long()
    all_keys, all_values = (
        _read(stored, of_them, used, query.dtype).transpose(1, 2).flatten(2, 3)
        for stored, of_them in zip((keys, values), _parts(scales), strict=True)
    )
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


def _parts(scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Those of keys and those of values, if there are any."""
    return (None, None) if scales is None else (scales[0], scales[1])


def store(
    new: tuple[Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    scales: Tensor | None,
    pages: Tensor,
    places: Tensor,
) -> None:
    """Writes `new` keys and values [T, key heads, D] to the `places` [T] of `pages` [T], in place.

    With `scales` [2, pages, key heads, size] they are rounded to float8, so that the largest number
    of each head of a token is float8's largest.
    """
    for one, numbers, of_them in zip(new, stored, _parts(scales), strict=True):
        _write(one, numbers, of_them, pages, places)


def _write(
    new: Tensor, stored: Tensor, scales: Tensor | None, pages: Tensor, places: Tensor
) -> None:
    if scales is None:
        stored[pages, :, places] = new
        return
    scale = (new.abs().amax(-1).float() / LARGEST).clamp(min=SMALLEST)
    scales[pages, :, places] = scale
    small = (new.float() / scale[..., None]).to(stored.dtype)
    # torch has no indexed assignment of float8.
    stored.view(torch.uint8)[pages, :, places] = small.view(torch.uint8)


def _read(stored: Tensor, scales: Tensor | None, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """What is in `pages` [B, N]: [B, N, key heads, size, D], in `dtype`."""
    if scales is None:
        return stored[pages]
    numbers = stored.view(torch.uint8)[pages].view(stored.dtype)
    return (numbers.float() * scales[pages][..., None]).to(dtype)
