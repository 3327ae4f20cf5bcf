"""Attentions that are not softmax: lacuna's and users' own, as transformers calls them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lacuna.config import UserError
from lacuna.config.attentions import OTHER, SCALE, SINKS, TRAINED
from lacuna.config.user_code import import_attribute
from lacuna.model.attention import of_one_width
from lacuna.model.learned_attention import Learned, gated, learn, number_of
from lacuna.model.merged_attention import merged_attention
from lacuna.model.scaled_attention import scaled_queries
from lacuna.parallel.context import gather_sequence, ring_attention
from lacuna.parallel.partial_attention import PARTIAL_ATTENTIONS, Part, visible

# The names of the attentions that transformers' own code has asked for.
CALLED: set[str] = set()
# What transformers takes for a name of one of its own kinds of attention.
_TAKEN = ("flash", "sdpa", "flex_attention", "paged")


@dataclass(frozen=True)
class OwnAttention:
    """An attention, and what it can do; what it cannot is refused before a run.

    Attributes:
        function: `function(query, key, value, part, scaling, window)`, differentiable. `query` is
            [B, T, heads, D], `key` [B, stop, key heads, D] and `value` [B, stop, key heads, width];
            it returns [B, T, heads, width]. `part` says which queries see which keys (see `Part`;
            `visible` makes a mask of it), `scaling` is for the scores, and with a `window` a query
            sees only itself and the window - 1 keys before it.
        documents: whether the function goes by the bounds of documents in `part`.
        windows: whether it goes by `window`.
        merged: its computation over a part of the keys and the gradients of that, like `attend`
            and `attend_backward` in `parallel/partial_attention.py`, where results over parts are
            merged by their log-sum-exps. The ring of context parallelism needs that.
        relative_flops: its FLOPs for a pair of query and key, relative to softmax attention's.
        scaled: whether queries are first multiplied by the logarithm of the keys that they see, and
            by a learned number of their head.
        sinks: whether the function is also given, after `window`, a learned number of each head, a
            tensor [heads] that begins at 0. It is the parameter `attention_sinks` of each layer.
        gate: whether the output is multiplied by learned gates, one for each of the "heads" or of
            their "elements". They are the sigmoid of a linear map of the layer's input, which is
            the module `attention_gate` of each layer.
    """

    function: Callable[..., Tensor]
    documents: bool
    windows: bool
    merged: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    relative_flops: float = 1.0
    scaled: bool = False
    sinks: bool = False
    gate: Literal["heads", "elements"] | None = None


def of_parts(kind: str, attend: Callable[..., Any], backward: Callable[..., Any]) -> OwnAttention:
    """The attention, under the name `kind`, that these two compute over parts of the keys."""
    PARTIAL_ATTENTIONS[kind] = (attend, backward)
    function = partial(merged_attention, kind)
    return OwnAttention(function, documents=True, windows=True, merged=(attend, backward))


@cache
def register(name: str) -> OwnAttention:
    """Makes an attention known to transformers, for training and for generation.

    Raises `UserError` where there is none of this name.
    """
    try:
        own = import_attribute(OTHER.get(name, name))
    except ValueError as error:
        raise UserError(f'model.attention: "{name}": {error}.') from error
    if not isinstance(own, OwnAttention):
        raise UserError(
            f'model.attention: "{name}" is no lacuna.model.own_attention.OwnAttention: wrap the '
            "function in one, which says what it can do."
        )
    if any(part in name for part in _TAKEN):
        raise UserError(
            f'model.attention: transformers would take "{name}" for one of its own: leave '
            f"{', '.join(_TAKEN)} out of the name."
        )
    numbers = [*[SCALE] * own.scaled, *[SINKS] * own.sinks]
    learn(name, Learned(tuple(numbers), own.gate))
    if own.merged is not None:
        PARTIAL_ATTENTIONS[name] = own.merged
    AttentionInterface.register(TRAINED + name, partial(_attend_in_training, name, own))
    AttentionInterface.register(name, partial(attend_to_mask, name, own))
    AttentionMaskInterface.register(name, whole_mask)
    return own


def _refuse_what_is_lacking(
    name: str,
    own: OwnAttention,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
) -> None:
    """Raises `UserError` for what a layer asks for and the attention has not."""
    problem = None
    if dropout:
        problem = "has no dropout"
    elif softcap is not None:
        problem = "has no soft cap"
    elif sinks is not None:
        problem = "has no sinks"
    elif window is not None and not own.windows:
        problem = "has no sliding window"
    if problem is not None:
        raise UserError(
            f'model.attention: "{name}" {problem}, which the model asks for: choose another model '
            "or attention."
        )


def _attend_in_training(
    name: str,
    own: OwnAttention,
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
    parts: tuple[Part, ...] = (),
    group: ProcessGroup | None = None,
    ring: tuple[Tensor, int] | None = None,
    attention_gate: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of documents in rows; arguments are those of `packed_attention`."""
    assert parts, f"{type(module).__name__} dropped what it was told of the documents"
    _refuse_what_is_lacking(name, own, dropout, softcap, s_aux, sliding_window)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if own.scaled:
        query = scaled_queries(name, module, query, parts, sliding_window)
    if ring is not None and group is not None and sliding_window is None:
        width = value.shape[-1]
        tensors = of_one_width(query, key, value)
        output = ring_attention(*tensors, *ring, group, scaling, name)
        return gated(output[..., :width].transpose(1, 2), attention_gate), None
    if group is not None:
        key, value = gather_sequence(key, 2, group), gather_sequence(value, 2, group)
    outputs = []
    learned = _sinks_of(name, own, module, query.shape[1])
    for part, queries in zip(parts, query.chunk(len(parts), 2), strict=True):
        keys, values = (one[:, :, : part.stop].transpose(1, 2) for one in (key, value))
        queries = queries.transpose(1, 2)
        outputs.append(own.function(queries, keys, values, part, scaling, sliding_window, *learned))
    return gated(torch.cat(outputs, dim=1), attention_gate), None


def _sinks_of(name: str, own: OwnAttention, module: nn.Module, heads: int) -> tuple[Tensor, ...]:
    """What the function of an attention is given beside the rest: its sinks, if it has any."""
    return (number_of(name, SINKS, module, heads),) if own.sinks else ()


def whole_mask(*arguments: Any, **named: Any) -> Tensor | None:
    """The mask [B, 1, T, keys] of what each query sees, which transformers might leave out."""
    return sdpa_mask(*arguments, **(named | {"allow_is_causal_skip": False}))


def attend_to_mask(
    name: str,
    own: OwnAttention,
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
    attention_gate: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes attention as transformers' own code asks for it, in generation with a cache too."""
    _refuse_what_is_lacking(name, own, dropout, softcap, s_aux, sliding_window)
    CALLED.add(name)
    if attention_mask is None:
        raise NotImplementedError(f"{type(module).__name__} makes no mask for {name}")
    part = _part_of(attention_mask, sliding_window)
    if own.scaled:
        query = scaled_queries(name, module, query, (part,), sliding_window)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (one.transpose(1, 2).contiguous() for one in (query, key, value))
    learned = _sinks_of(name, own, module, query.shape[2])
    output = own.function(query, key, value, part, scaling, sliding_window, *learned)
    output = gated(output, attention_gate)
    unseeing = ~attention_mask[:, 0].any(-1)  # in padding, of which functions may make anything
    return output.masked_fill(unseeing[:, :, None, None], 0), None


def _part_of(mask: Tensor, window: int | None) -> Part:
    """The pieces of rows that a mask [B, 1, T, keys] keeps apart: padding, and what is no padding.

    Raises `NotImplementedError` for a mask that is more than causal, padded and in a window.
    """
    known: Part | None = getattr(mask, "_lacuna_part", None)
    if known is not None:
        return known
    rows, _, queries, keys = mask.shape
    seen = mask[:, 0]
    tokens = torch.arange(keys, device=mask.device)
    is_key = seen.any(1)
    first = torch.where(is_key, tokens, keys).amin(1)
    stop = torch.where(is_key, tokens + 1, 0).amax(1)
    first = first.minimum(stop)
    padding = queries - seen.any(2).sum(1)
    # Of each row: padding without queries, queries of padding, the text, and what is unused.
    none = torch.zeros_like(first)
    ends_q = torch.stack((none, padding, none + queries, none + queries), 1)
    ends_k = torch.stack((first, first, stop, none + keys), 1)
    starts = torch.arange(rows, device=mask.device)[:, None]
    cu_q, cu_k = (
        nn.functional.pad((ends + starts * length).flatten(), (1, 0)).int()
        for ends, length in ((ends_q, queries), (ends_k, keys))
    )
    part = Part(cu_q, cu_k, max(queries, keys), keys)
    if mask.dtype != torch.bool or not torch.equal(visible(part, rows, queries, window), seen):
        raise NotImplementedError("tokens see others than those before them in a text or window")
    mask._lacuna_part = part  # type: ignore[attr-defined]  # all layers are given the same mask
    return part
