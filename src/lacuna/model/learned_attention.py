"""What attentions learn beside the model: a scale or a sink of each head, and gates.

They are parameters of transformers' own attention modules, which models are given as they are made,
and so are trained, sharded, saved and exported as all others. A gate is a linear map of a layer's
input, whose sigmoid the attention's output is multiplied by (Qiu et al., arXiv 2505.06708).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import unwrap
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.config.attentions import SCALE, SINKS, TRAINED
from lacuna.model.weights import stored_slices

GATE = "attention_gate"
# The first value of the parameters [heads]; that of scales is the one in the code of softpick's
# authors.
INITIAL = {SCALE: 0.3, SINKS: 0.0}


@dataclass(frozen=True)
class Learned:
    """What an attention learns: numbers of each head by name, and gates of heads or of elements."""

    numbers: tuple[str, ...]
    gate: Literal["heads", "elements"] | None


_LEARNED: dict[str, Learned] = {}


def learn(name: str, learned: Learned) -> None:
    """Gives the models that are made from now on, if they have this attention, what it learns."""
    _LEARNED.pop(name, None)
    if learned != Learned((), None):
        _LEARNED[name] = learned
        _extend_new_models()


@cache
def _extend_new_models() -> None:
    """Has models be given what their attention learns.

    transformers calls `post_init` at the end of the construction of every model, before it draws or
    loads weights.
    """
    post_init: Callable[[PreTrainedModel], None] = PreTrainedModel.post_init

    def with_learned(self: PreTrainedModel) -> None:
        _add_learned(self)
        post_init(self)

    PreTrainedModel.post_init = with_learned  # type: ignore[method-assign]


def _add_learned(model: PreTrainedModel) -> None:
    """Adds to each attention of a model, in place, what its configuration's attention learns."""
    noted = getattr(model.config, "attn_implementation", None)
    name = noted or str(model.config._attn_implementation).removeprefix(TRAINED)
    learned = _LEARNED.get(name)
    if learned is None:
        return
    module: Any
    for module in model.modules():
        if not hasattr(module, "layer_idx") or not _asks_for_attention(module):
            continue
        config = getattr(module, "config", model.config)
        heads = getattr(module, "num_heads", None) or config.num_attention_heads
        for number in learned.numbers:
            if not hasattr(module, number):
                setattr(module, number, nn.Parameter(torch.full((heads,), INITIAL[number])))
        if learned.gate is not None and not hasattr(module, GATE):
            _add_gate(module, heads, config.hidden_size, learned.gate)


def _asks_for_attention(module: nn.Module) -> bool:
    """Whether a module's code calls an attention by its name; linear attention does not."""
    return "ALL_ATTENTION_FUNCTIONS" in unwrap(type(module).forward).__code__.co_names


def _add_gate(module: Any, heads: int, width: int, kind: Literal["heads", "elements"]) -> None:
    """Gives an attention a gate, in place, that it makes of its input and is told as `GATE`."""
    gates = heads
    if kind == "elements":
        widths = (getattr(module, name, None) for name in ("v_head_dim", "head_dim"))
        gates = heads * next(filter(None, widths), width // heads)
    setattr(module, GATE, nn.Linear(width, gates, bias=False))
    module.register_forward_pre_hook(_open_gate, with_kwargs=True)


def _open_gate(
    module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What an attention is called with, and its gates [B, T, heads] or [B, T, heads · width]."""
    states = arguments[0] if arguments else named["hidden_states"]
    gate = getattr(module, GATE)
    return arguments, named | {GATE: gate(states).sigmoid()}


def gated(output: Tensor, gate: Tensor | None) -> Tensor:
    """An attention's output [B, T, heads, width] times its gates, if it has some."""
    if gate is None:
        return output
    product: Tensor = output * gate.unflatten(-1, (output.shape[2], -1)).to(output.dtype)
    return product


def number_of(name: str, number: str, module: nn.Module, heads: int) -> Tensor:
    """The numbers [heads] that the attention `name` has learned in a module.

    Raises `UserError` for a module that has none for each of its heads.
    """
    learned: Any = getattr(module, number, None)
    if learned is None or len(learned) != heads:
        raise UserError(
            f'model.attention: "{name}" cannot be had: {type(module).__name__} is not known to '
            "have a number of heads that stays: choose another model or attention."
        )
    found: Tensor = learned
    return found


def begin_learned(model: nn.Module, source: str, home: torch.device) -> None:
    """Gives what the attentions of a sharded meta model learn, in place, memory and a first value.

    Files of softmax weights have none, so that numbers of heads keep it; gates must be in files.
    Raises `UserError` where numbers could not learn then, since only adapters are trained.
    """
    stored = [*stored_slices(source)]
    for module in model.modules():
        for name, value in INITIAL.items():
            number = getattr(module, name, None)
            if number is None or not number.is_meta:
                continue
            if not number.requires_grad and not any(key.endswith(name) for key in stored):
                raise UserError(
                    f"lora.rank: {source} has no {name}, which the model's attention needs, and "
                    "with adapters it is not trained: train the whole model first, or choose an "
                    "attention without it."
                )
            made = torch.empty_like(number, device=home).fill_(value)
            setattr(module, name, nn.Parameter(made, number.requires_grad))
