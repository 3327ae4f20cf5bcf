"""A model in small: a layer of every kind, few tokens, and windows shorter than these."""

import copy
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.model.initial import construct_model
from lacuna.model.rotation import fix_rotations

_CPU = torch.device("cpu")
LENGTH = 28
_VOCABULARY = 64
_DRAWN = 1_000_003  # a prime number: no row of a matrix is another one's

# Settings of a distance beyond which a token sees others differently, or of how many it sees, and
# the most that is tried: few enough that a specimen's tokens see others in several ways.
_LIMITS = {
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_window_size": 8,
    "window_size": 8,
    "local_attention": 8,
    "attention_chunk_size": 8,
    "keep_window_size": 8,
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "block_size": 2,
    "floor_scale": 8,
    "log_scaling_n_floor": 8,
}

Found = TypeVar("Found")
# What was found out about models, by all that it depends on.
_found: dict[tuple[Any, ...], Any] = {}


def found_once(
    model_config: PretrainedConfig, told: tuple[Any, ...], find: Callable[[], Found]
) -> Found:
    """What `find` returns, which depends on a model's configuration and on what it is `told` alone.

    What was found once is known from then on: a reference or a critic is often the same model.
    """
    known_by = type(model_config), repr(vars(model_config)), *told
    if known_by not in _found:
        _found[known_by] = find()
    return cast(Found, _found[known_by])


def tokens_to_try(model_config: PretrainedConfig) -> range:
    """Ids that a specimen knows: without the first and the last, which may mean something to it."""
    known = min(model_config.get_text_config().vocab_size, _VOCABULARY)
    return range(3, known - 2) if known > LENGTH else range(known)


def specimen(
    model_config: PretrainedConfig,
    attention: str | None = None,
    longest: int = LENGTH,
    device: torch.device = _CPU,
) -> PreTrainedModel:
    """A model in small, float32 on `device`, in evaluation mode, with weights that all matter.

    It has the layers up to the last one of a new kind, few experts, and layers of one kind share
    their weights.
    The weights are drawn larger than those of new models, which would hide much. `longest` is a
    run's longest position.
    """
    return specimen_and_layers(model_config, attention, longest, device, least=1)[0]


def specimen_and_layers(
    model_config: PretrainedConfig,
    attention: str | None,
    longest: int,
    device: torch.device,
    least: int,
) -> tuple[PreTrainedModel, nn.ModuleList]:
    """The same model, with at `least` so many layers, and the list of its layers."""
    small = _shorten_config(model_config)
    # What begins with _ are transformers' own notes, which every model has.
    if any("expert" in name and name[0] != "_" for name in vars(small.get_text_config())):
        from lacuna.model.few_experts import with_few_experts  # an extension

        small = with_few_experts(small)
    shadow = meta_model(small, attention, torch.float32)
    first_of = _first_of_each_kind(shadow)
    layers = decoder_layers(shadow)
    for place, first in enumerate(first_of):
        layers[place] = layers[first]
    count = max(least, max(first_of) + 1)
    del layers[count:]
    real = {name for name, _ in shadow.named_parameters()}
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = construct_model(small, attention, torch.float32, real, draw_matrices=False)
    layers = decoder_layers(model)
    del layers[count:]
    for layer, first in zip(layers, first_of, strict=False):
        _share_weights(layers[first], layer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = _numbers(weight.shape, generator)
            if weight.ndim > 1:
                weight.copy_(drawn / math.sqrt(weight.shape[-1]))
            else:
                weight.add_(drawn, alpha=0.1)
    fix_rotations(model, longest)
    model.to(device)  # type: ignore[arg-type]  # transformers' `to` is typed as no method
    return model.eval(), layers


def _numbers(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Normal numbers. Large tensors repeat them, at other places of their rows: to draw is slow."""
    drawn = torch.randn(min(shape.numel(), _DRAWN), generator=generator)
    times = math.ceil(shape.numel() / _DRAWN)
    return drawn.repeat(times)[: shape.numel()].view(shape)


def _shorten_config(model_config: PretrainedConfig) -> PretrainedConfig:
    """A copy of the configuration with a small vocabulary, and limits that short rows cross."""
    small = copy.deepcopy(model_config)
    text_config = small.get_text_config()
    text_config.vocab_size = min(text_config.vocab_size, _VOCABULARY)
    padding = getattr(text_config, "pad_token_id", None)
    if padding is not None and padding >= text_config.vocab_size:  # which some insist on
        text_config.pad_token_id = text_config.vocab_size - 1
    for name, most in _LIMITS.items():
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > most:
            setattr(text_config, name, most)
    return small


def _first_of_each_kind(model: PreTrainedModel) -> list[int]:
    """For each layer the index of the first one like it in class, weights and settings."""
    layers = decoder_layers(model)
    settings = model.config.get_text_config().to_dict().values()
    lists = [one for one in settings if isinstance(one, list | tuple) and len(one) == len(layers)]
    kinds = []
    for place, layer in enumerate(layers):
        shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
        kinds.append((type(layer), shapes, *(str(one[place]) for one in lists)))
    return [kinds.index(kind) for kind in kinds]


def _share_weights(source: nn.Module, target: nn.Module) -> None:
    """Gives `target`, in place, the parameters of `source`, a module like it."""
    for theirs, ours in zip(source.modules(), target.modules(), strict=True):
        ours._parameters.update(theirs._parameters)
