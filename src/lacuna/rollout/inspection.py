"""What a model's attention and its hidden states are like on texts, layer by layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from lacuna.config import UserError
from lacuna.config.attentions import is_own
from lacuna.model.architecture import decoder_layers
from lacuna.model.own_attention import attend_to_mask, register, whole_mask
from lacuna.parallel.fsdp import inference

SINKS = (0.2, 0.3)  # of a head's attention, on the first token
_NAME = "lacuna_inspected"
Observe = Callable[[int, Tensor], None]


@dataclass
class Layer:
    """The means over rows of text of what a layer does.

    Attributes:
        first: each head's attention on the first token of a row, the mean over all queries.
        sinks: the share of the heads whose `first` is above each of `SINKS` (Gu et al., "When
            attention sink emerges", arXiv 2410.10781).
        sparsity: the share of the pairs of a query and a key not after it whose weight is 0.
        kurtosis: of the numbers in the hidden states that the layer returns; 3 if they are normal.
        largest: the largest absolute value of them.
    """

    first: list[float]
    sinks: list[float]
    sparsity: float
    kurtosis: float
    largest: float


def inspect_model(model: PreTrainedModel, rows: Tensor) -> list[Layer]:
    """Looks at every layer of a model while it reads rows of tokens [rows, T], one at a time.

    Raises `UserError` for a model whose attention cannot be seen.
    """
    weights: dict[int, list[Tensor]] = {}
    states: dict[int, list[Tensor]] = {}
    layers = decoder_layers(model)

    def observe(layer: int, seen: Tensor) -> None:
        weights.setdefault(layer, []).append(_of_weights(seen))

    def keep(place: int, _: nn.Module, __: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        states.setdefault(place, []).append(_of_states(hidden))

    hooks = [
        layer.register_forward_hook(partial(keep, place)) for place, layer in enumerate(layers)
    ]
    try:
        with inference(model), _observed(model, observe) as options:
            for row in rows.to(model.device):
                output = model(input_ids=row[None], use_cache=False, **options)
                for place, seen in enumerate(getattr(output, "attentions", None) or ()):
                    observe(place, seen)
    finally:
        for hook in hooks:
            hook.remove()
    if not weights:
        raise UserError(
            f"inspect: {type(model).__name__} does not show its attention: choose another model."
        )
    return [_layer_of(weights.get(place, []), states[place]) for place in range(len(layers))]


@contextmanager
def _observed(model: PreTrainedModel, observe: Observe) -> Iterator[dict[str, Any]]:
    """A context in which a model's attention is observed, or is returned if it is softmax.

    Yields what the model is to be called with.
    """
    attention = str(model.config._attn_implementation)
    try:
        if is_own(attention):
            AttentionInterface.register(_NAME, partial(_attend_observed, attention, observe))
            AttentionMaskInterface.register(_NAME, whole_mask)
            model.set_attn_implementation(_NAME)
            yield {}
        else:
            model.set_attn_implementation("eager")
            yield {"output_attentions": True}
    finally:
        model.set_attn_implementation(attention)


def _attend_observed(
    name: str,
    observe: Observe,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    **named: Any,
) -> tuple[Tensor, None]:
    """Computes an own attention by its weights, which are what it makes of values 0 and 1."""
    rows, key_heads, keys, _ = key.shape
    ones = torch.eye(keys, dtype=value.dtype, device=value.device)
    ones = ones.expand(rows, key_heads, keys, keys)
    found, _ = attend_to_mask(name, register(name), module, query, key, ones, *arguments, **named)
    weights = found.transpose(1, 2)
    observe(module.layer_idx, weights)
    values = value.repeat_interleave(query.shape[1] // key_heads, dim=1)
    return (weights @ values).transpose(1, 2), None


def _of_weights(weights: Tensor) -> Tensor:
    """Of weights [1, heads, T, T]: the attention of each head on the first token, and sparsity."""
    weights = weights[0].float()
    first = weights[:, :, 0].mean(1)
    causal = torch.ones(weights.shape[1:], dtype=torch.bool, device=weights.device).tril()
    unused = (weights[:, causal] == 0).float().mean()
    return torch.cat((first, unused[None])).cpu()


def _of_states(states: Tensor) -> Tensor:
    """The kurtosis and the largest absolute value of hidden states."""
    numbers = states.double().flatten()
    centred = numbers - numbers.mean()
    kurtosis = centred.pow(4).mean() / centred.pow(2).mean().pow(2)
    return torch.stack((kurtosis, numbers.abs().max())).cpu()


def _layer_of(weights: list[Tensor], states: list[Tensor]) -> Layer:
    """The means over rows; a layer without attention has no heads."""
    kurtosis, largest = torch.stack(states).mean(0).tolist()
    if not weights:
        return Layer([], [0.0] * len(SINKS), 0.0, kurtosis, largest)
    of_rows = torch.stack(weights)
    first = of_rows[:, :-1]
    sinks = [float((first > least).float().mean()) for least in SINKS]
    return Layer(first.mean(0).tolist(), sinks, float(of_rows[:, -1].mean()), kurtosis, largest)
