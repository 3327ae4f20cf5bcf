"""What a model's attention and its hidden states are like on texts, layer by layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from lacuna.config import UserError
from lacuna.config.attentions import TRAINED, is_own
from lacuna.model.architecture import decoder_layers, is_from_fla
from lacuna.model.learned_attention import gated
from lacuna.model.own_attention import attend_to_mask, register, whole_mask
from lacuna.model.specimen import LENGTH, specimen_and_layers
from lacuna.parallel.fsdp import inference

SINKS = (0.2, 0.3)  # of a head's attention, on the first token
_NAME = "lacuna_inspected"
_BESIDE_HEADS = 3  # numbers of a layer: sparsity, kurtosis, largest
LOOK = "metrics.attention"
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


def inspect_model(model: PreTrainedModel, rows: Sequence[Tensor]) -> list[Layer]:
    """Looks at every layer of a model while it reads rows of tokens [T], one at a time.

    Raises `UserError` for a model whose attention cannot be seen.
    """
    on_device = [row.to(model.device) for row in rows]
    return layers_of(look(model, decoder_layers(model), on_device, "inspect"))


def look(
    model: PreTrainedModel,
    layers: nn.ModuleList,
    rows: Sequence[Tensor],
    asked_by: str,
    one_by_one: bool = False,
) -> Tensor:
    """What the layers of a model do to rows of tokens [T] that it reads, one at a time.

    Returns float64 [rows, layers, 3 + heads] on the CPU: the sparsity, the kurtosis, the largest
    value, and each head's attention on the first token, which is -inf where a layer has no such
    head. Layers' weights of attention are let go one by one, but in old classes of transformers,
    which return them all together. Raises `UserError`, which names what it is `asked_by`, for a
    model whose attention cannot be seen, and with `one_by_one` for those.
    """
    weights: dict[int, Tensor] = {}
    states: dict[int, Tensor] = {}

    def observe(layer: int, seen: Tensor) -> None:
        weights[layer] = _of_weights(seen)

    def keep(place: int, _: nn.Module, __: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        states[place] = _of_states(hidden)

    found = []
    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            hooks.callback(layer.register_forward_hook(partial(keep, place)).remove)
        options = hooks.enter_context(_observed(model, layers, observe))
        if one_by_one and options:
            raise UserError(
                f"{asked_by}: {type(model).__name__} does not show the attention of one layer at "
                "a time: leave it out."
            )
        with inference(model):
            for row in rows:
                output = model(input_ids=row[None], use_cache=False, **options)
                for place, seen in enumerate(getattr(output, "attentions", None) or ()):
                    observe(place, seen)
                del output
                if not weights or len(states) < len(layers):
                    raise UserError(
                        f"{asked_by}: {type(model).__name__} does not show its attention: choose "
                        "another model."
                    )
                found.append(_by_layer(weights, states, len(layers)))
    return torch.stack(found)


def require_visible_attention(model_config: PretrainedConfig) -> None:
    """Raises `UserError` where a run cannot look at the attention of its model.

    A small one is tried.
    """
    if is_from_fla(model_config):
        raise UserError(f"{LOOK}: models of fla do not show their attention: leave it out.")
    cpu = torch.device("cpu")
    attention = str(model_config._attn_implementation)
    if not is_own(attention.removeprefix(TRAINED)):
        attention = "eager"  # which weights are returned by
    model, layers = specimen_and_layers(model_config, attention, LENGTH, cpu, least=1)
    look(model, layers, [torch.arange(16)], LOOK, one_by_one=True)


def _by_layer(weights: dict[int, Tensor], states: dict[int, Tensor], layers: int) -> Tensor:
    """What was seen of a row, [layers, 3 + heads]; a layer without attention has no heads."""
    none = torch.zeros(1)
    parts = [(weights.get(place, none), states[place]) for place in range(layers)]
    numbers = [torch.cat((of[-1:], beside, of[:-1])) for of, beside in parts]
    return pad_sequence(numbers, batch_first=True, padding_value=-torch.inf).double()


def layers_of(numbers: Tensor) -> list[Layer]:
    """The means over rows of what `look` has seen, and the largest values in any."""
    return [_layer_of(numbers[:, place]) for place in range(numbers.shape[1])]


def _layer_of(numbers: Tensor) -> Layer:
    beside = numbers[:, :_BESIDE_HEADS]
    sparsity, kurtosis, _ = beside.mean(0).tolist()
    largest = float(beside[:, -1].max())
    first = numbers[:, _BESIDE_HEADS:]
    first = first[:, (first != -torch.inf).any(0)]
    heads = first.shape[1]
    sinks = [float((first > least).double().mean()) if heads else 0.0 for least in SINKS]
    return Layer(first.mean(0).tolist(), sinks, sparsity, kurtosis, largest)


def summary_of(layers: Sequence[Layer]) -> dict[str, float]:
    """The means over layers of what they do, and the largest of their largest values."""
    kinds = [numbers_of(layer) for layer in layers]
    means = {name: sum(kind[name] for kind in kinds) / len(kinds) for name in kinds[0]}
    return means | {"largest": max(layer.largest for layer in layers)}


def numbers_of(layer: Layer) -> dict[str, float]:
    """What a layer does in six numbers, by name; its attention on the first token is a mean."""
    low, high = layer.sinks
    return {
        "first": sum(layer.first) / max(len(layer.first), 1),
        "sinks_0.2": low,
        "sinks_0.3": high,
        "sparsity": layer.sparsity,
        "kurtosis": layer.kurtosis,
        "largest": layer.largest,
    }


@contextmanager
def _observed(
    model: PreTrainedModel, layers: nn.ModuleList, observe: Observe
) -> Iterator[dict[str, Any]]:
    """A context in which a model's attention is observed, or is returned if it cannot be.

    Yields what the model is to be called with. Layers that are compiled run as they are written.
    """
    attention = str(model.config._attn_implementation)
    own = attention.removeprefix(TRAINED)
    hooks = []
    if is_own(own):
        AttentionInterface.register(_NAME, partial(_attend_observed, own, observe))
        AttentionMaskInterface.register(_NAME, whole_mask)
    else:
        for place, module, index in _recorded(model, layers):
            told = partial(_observe_output, observe, place, index)
            hooks.append(module.register_forward_hook(told))
    try:
        model.set_attn_implementation(_NAME if is_own(own) else "eager")
        with torch.compiler.set_stance("force_eager"):
            yield {} if hooks or is_own(own) else {"output_attentions": True}
    finally:
        model.set_attn_implementation(attention)
        for hook in hooks:
            hook.remove()


def _recorded(
    model: PreTrainedModel, layers: nn.ModuleList
) -> Iterator[tuple[int, nn.Module, int]]:
    """The modules of a model that return weights of attention, by layer, and their place there.

    They are those whose weights transformers itself records for one of the models in it.
    """
    recorded: dict[type, int] = {}
    for part in model.modules():
        kinds: Any = (getattr(type(part), "_can_record_outputs", None) or {}).get("attentions", ())
        for kind in kinds if isinstance(kinds, list | tuple) else [kinds]:
            target = getattr(kind, "target_class", kind)
            if isinstance(target, type):
                recorded[target] = getattr(kind, "index", 1)
    for place, layer in enumerate(layers):
        for module in layer.modules():
            for target, index in recorded.items():
                if isinstance(module, target):
                    yield place, module, index


def _observe_output(
    observe: Observe, place: int, index: int, _: nn.Module, __: Any, output: Any
) -> None:
    if isinstance(output, tuple) and output[index] is not None:
        observe(place, output[index])


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
    """Computes an own attention by its weights, which are what it makes of values 0 and 1.

    It does in float32 at least: kernels for half precision take no values as wide as a row is long.
    """
    gate = named.pop("attention_gate", None)  # which is of what the weights make
    dtype = value.dtype
    wide = torch.promote_types(dtype, torch.float32)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    rows, key_heads, keys, _ = key.shape
    ones = torch.eye(keys, dtype=value.dtype, device=value.device)
    ones = ones.expand(rows, key_heads, keys, keys)
    found, _ = attend_to_mask(name, register(name), module, query, key, ones, *arguments, **named)
    weights = found.transpose(1, 2)
    observe(module.layer_idx, weights)
    values = value.repeat_interleave(query.shape[1] // key_heads, dim=1)
    return gated((weights @ values).transpose(1, 2).to(dtype), gate), None


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
