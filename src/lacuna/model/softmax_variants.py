"""Softmax attention that need not attend to anything: beside sinks, or with gates on its output."""

from dataclasses import replace

from torch import Tensor

from lacuna.model.attention import of_one_width
from lacuna.model.own_attention import OwnAttention, of_parts
from lacuna.model.sinks import sink_attention
from lacuna.parallel.partial_attention import PARTIAL_ATTENTIONS, Part


def beside_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None,
    sinks: Tensor,
) -> Tensor:
    """Softmax beside one more key of each head, of value 0, whose scores are the `sinks` [heads].

    GPT-OSS's attention: weights of e^x / (e^sink + Σ e^x).
    """
    width = value.shape[-1]
    tensors = of_one_width(query, key, value)
    return sink_attention(*tensors, sinks, part, scaling, window)[..., :width]


def plus_one(
    query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float, window: int | None
) -> Tensor:
    """Softmax beside an empty key of score 0: weights of e^x / (1 + Σ e^x)."""
    sinks = query.new_zeros(query.shape[2])
    return beside_sinks(query, key, value, part, scaling, window, sinks)


_SOFTMAX = of_parts("softmax", *PARTIAL_ATTENTIONS["softmax"])
SOFTMAX_PLUS_ONE = OwnAttention(plus_one, documents=True, windows=True)
SOFTMAX_SINKS = OwnAttention(beside_sinks, documents=True, windows=True, sinks=True)
GATED_SOFTMAX = replace(_SOFTMAX, gate="elements")
HEAD_GATED_SOFTMAX = replace(_SOFTMAX, gate="heads")
