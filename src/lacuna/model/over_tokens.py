"""Which layers pass something along a row beside attention, by what transformers' code calls."""

import sys
from types import ModuleType

from transformers import PretrainedConfig

from lacuna.model.architecture import causal_class

_CONVOLUTION = "causal_conv1d_fn"
# The functions that hand a state on from token to token.
_RECURRENCES = (
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
)


def has_convolutions(model_config: PretrainedConfig) -> bool:
    """Whether a model has layers that convolve tokens with those before them."""
    return hasattr(code_of(model_config), _CONVOLUTION)


def has_recurrences(model_config: PretrainedConfig) -> bool:
    """Whether a model has layers that hand a state on from token to token."""
    return any(hasattr(code_of(model_config), name) for name in _RECURRENCES)


def code_of(model_config: PretrainedConfig) -> ModuleType:
    """The module of transformers that has the code of a model."""
    return sys.modules[causal_class(model_config).__module__]
