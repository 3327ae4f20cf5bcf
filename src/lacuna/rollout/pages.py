"""Keys and values of running sequences in pages, and the attention that keeps them there."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from transformers import AttentionInterface

from lacuna.config import UserError
from lacuna.model.attention import packed_attention
from lacuna.parallel.partial_attention import Part
from lacuna.rollout.decode_attention import SMALL, decode_attention, store

PAGED = "lacuna_paged"
# Tokens of a page.
SIZE = 64


class Kept(NamedTuple):
    """What an attention layer keeps of a token: a key and a value of each of its key heads."""

    heads: int
    width: int
    dtype: torch.dtype

    def size_of_token(self, small: bool) -> int:
        """The bytes of a token, if they are `small` in float8 with a float32 scale a head."""
        each = self.width + 4 if small else self.width * self.dtype.itemsize
        return 2 * self.heads * each


class Pool:
    """Pages of every attention layer of a model, under the same numbers; page 0 belongs to none.

    A layer's pages are made when it is first called, or all before. They are attributes of its
    module, since that is all that attention is given of a layer. `small` ones are in float8.
    """

    def __init__(self, pages: int, size: int = SIZE, small: bool = False) -> None:
        self.size = size
        self.small = small
        self.pages = pages
        self.free = list(range(pages - 1, 0, -1))
        self.modules: dict[nn.Module, None] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            del module.rollout_keys, module.rollout_values, module.rollout_scales
        self.modules.clear()

    def make(self, module: nn.Module, kept: Kept, device: torch.device) -> None:
        """Makes the pages of a layer, unless it has them."""
        if module in self.modules:
            return
        shape = (self.pages, kept.heads, self.size, kept.width)
        dtype = SMALL if self.small else kept.dtype
        # Not left as they are found: plain attention reads beyond the end of a sequence.
        for name in ("rollout_keys", "rollout_values"):
            setattr(module, name, torch.zeros(shape, dtype=dtype, device=device))
            maybe_mark_dynamic(getattr(module, name), 0)
        scales = torch.zeros(2, *shape[:3], device=device) if self.small else None
        if scales is not None:
            maybe_mark_dynamic(scales, 1)
        module.rollout_scales = scales  # type: ignore[assignment]  # mypy: or None
        self.modules[module] = None

    def tensors(self) -> list[Tensor]:
        """The pages of all layers, and their scales; numbers in float8 as the bytes that they are.

        torch copies no indexed float8.
        """
        found: list[Any] = []
        each: Any
        for each in self.modules:
            if self.small:
                found += [one.view(torch.uint8) for one in (each.rollout_keys, each.rollout_values)]
                found += each.rollout_scales
            else:
                found += [each.rollout_keys, each.rollout_values]
        return found

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies pages into others, in place."""
        tensors = self.tensors() if sources else []
        if tensors:
            new, old = torch.tensor([targets, sources], device=tensors[0].device)
        for tensor in tensors:
            tensor[new] = tensor[old]

    def take(self, count: int) -> list[int]:
        """So many pages that nobody has."""
        return [self.free.pop() for _ in range(count)]

    def kept(self) -> dict[nn.Module, Kept]:
        """What each layer keeps of a token, of those that have been called; it must be exact."""
        assert not self.small
        found: dict[nn.Module, Any] = {module: module.rollout_keys for module in self.modules}
        return {
            module: Kept(keys.shape[1], keys.shape[3], keys.dtype) for module, keys in found.items()
        }


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pool: Pool | None = None,
    places: Tensor | None = None,
    parts: tuple[Part, ...] = (),
    page_table: Tensor | None = None,
    new_positions: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention to keys and values in pages, for transformers' attention interface.

    Prompts come packed, as `query` [1, heads, T, D], with their `parts` and the `places` [T] of
    their tokens, in pages that the layer has or is given from the `pool`. A new token of each of B
    sequences comes as [B, heads, 1, D], with the sequences' pages in the `page_table` and the
    tokens' `new_positions`. Returns [B, T, heads, D]. Raises `UserError` for attention of other
    kinds.
    """
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise UserError("its attention has a mask, a soft cap or sinks")
    if query.shape[-1] != value.shape[-1]:
        raise UserError("its values have another width than its keys")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if page_table is not None and new_positions is not None:
        tokens = (each[:, :, 0] for each in (query, key, value))
        own = (module.rollout_keys, module.rollout_values, module.rollout_scales)
        where = (page_table, new_positions)
        output = decode_attention(*tokens, *own, *where, scaling, sliding_window or 0)
        return output[:, None], None
    if places is None:
        raise UserError("its attention is not told of pages")
    if pool is not None:
        pool.make(module, Kept(key.shape[1], key.shape[3], key.dtype), key.device)
    _store(module, key, value, places)
    return packed_attention(
        module, query, key, value, None, scaling, 0.0, sliding_window, parts=parts
    )


def _store(module: Any, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Writes keys and values [1, key heads, T, D] of a layer to `places` [T] of its pages."""
    assert key.shape[1] == module.rollout_keys.shape[1], "one head would be taken for all"
    size = module.rollout_keys.shape[2]
    new = (key[0].transpose(0, 1), value[0].transpose(0, 1))
    stored = (module.rollout_keys, module.rollout_values)
    store(new, stored, module.rollout_scales, places // size, places % size)


AttentionInterface.register(PAGED, paged_attention)
