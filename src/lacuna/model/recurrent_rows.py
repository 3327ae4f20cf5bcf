"""Layers with a state, in transformers' own hybrids: documents of a row are kept apart."""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from lacuna.model.over_tokens import code_of
from lacuna.parallel.partial_attention import Part

Parts = tuple[Part, ...]


def keep_documents_apart(model_config: PretrainedConfig) -> None:
    """Has layers of this kind of model begin anew with each document that attention is told of.

    Replaces functions of transformers' module of that kind, once. Where they are told of no
    documents, they compute what they did. What a row's documents then are to a model is tried as
    with any attention.
    """
    code = code_of(model_config)
    for name, replacement in _REPLACEMENTS.items():
        original = getattr(code, name, None)
        if original is not None and not isinstance(original, partial):
            setattr(code, name, partial(replacement, original))


def _are_apart(parts: Parts) -> bool:
    """Whether a row may have several documents."""
    return bool(parts) and not parts[0].whole


def _documents(bounds: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The number of each token's document, and of the tokens before it there, [count]."""
    tokens = torch.arange(count, dtype=bounds.dtype, device=bounds.device)
    documents = torch.searchsorted(bounds, tokens, right=True) - 1
    return documents, tokens - bounds[documents]


def _convolution(
    original: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    parts: Parts = (),
    **named: Any,
) -> Tensor:
    """A causal convolution by channel: `hidden` is [B, channels, T], `weight` [channels, K]."""
    if not _are_apart(parts):
        return original(hidden, weight, bias, activation=activation, **named)
    rows, _, length = hidden.shape
    _, places = _documents(parts[0].cu_q, rows * length)
    places = places.view(rows, 1, length)
    found = hidden * weight[:, -1:]
    for back in range(1, weight.shape[-1]):
        earlier = F.pad(hidden, (back, 0))[..., :length]
        found = found + torch.where(places >= back, earlier, 0) * weight[:, -1 - back, None]
    if bias is not None:
        found = found + bias[:, None]
    return found if activation is None else ACT2FN[activation](found)


@cache
def is_installed(package: str) -> bool:
    """Whether a package can be imported, looked up once: recurrences ask in every layer."""
    return find_spec(package) is not None


def _recurrence(
    told: str,
    package: str,
    original: Callable[..., Any],
    *given: Any,
    parts: Parts = (),
    **named: Any,
) -> Any:
    """A recurrence over tokens, of which tensors with values for each token are [B, T, ...].

    The kernel of a `package` is told of the documents by the argument `told`; without it,
    transformers says on a GPU that it is missing, and on a CPU documents are computed one by one.
    A state beside the result is left out.
    """
    if not _are_apart(parts):
        return original(*given, **named)
    rows = given[0].shape[:2]
    bounds = parts[0].cu_q
    has_kernel = given[0].is_cuda or is_installed(package)
    if has_kernel and told == "seq_idx":
        documents, _ = _documents(bounds, rows.numel())
        return original(*given, **named | {told: documents.view(rows).int()})

    def in_one_row(value: Any) -> Any:
        is_of_tokens = isinstance(value, Tensor) and value.ndim > 2 and value.shape[:2] == rows
        return value.flatten(0, 1)[None] if is_of_tokens else value

    given = tuple(in_one_row(value) for value in given)
    named = {name: in_one_row(value) for name, value in named.items()}
    if has_kernel:
        results = [original(*given, **named | {told: bounds})]
    else:
        results = []
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if start < end:
                results.append(_of_document(original, start, end, given, named | {told: None}))
    is_pair = isinstance(results[0], tuple)
    found = torch.cat([one[0] if is_pair else one for one in results], dim=1)
    found = found.view(*rows, *found.shape[2:])
    return (found, None) if is_pair else found


def _of_document(
    original: Callable[..., Any],
    start: int,
    end: int,
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """What a recurrence makes of the tokens from `start` to `end` of a single row."""
    row = given[0].shape[:2]

    def cut(value: Any) -> Any:
        is_of_tokens = isinstance(value, Tensor) and value.ndim > 2 and value.shape[:2] == row
        return value[:, start:end] if is_of_tokens else value

    return original(
        *(cut(value) for value in given), **{name: cut(value) for name, value in named.items()}
    )


def _fused(original: Callable[..., Any], *given: Any, parts: Parts = (), **named: Any) -> Any:
    """A kernel of a whole block, without which transformers computes the block's parts."""
    return None if _are_apart(parts) else original(*given, **named)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": partial(_recurrence, "cu_seqlens", "fla"),
    "chunk_kimi_delta_attention": partial(_recurrence, "cu_seqlens", "fla"),
    "mamba2_chunk_scan": partial(_recurrence, "seq_idx", "mamba_ssm"),
    "mamba2_split_conv1d_scan_combined": _fused,
}
