"""Which of transformers' classes a configuration becomes: a causal LM, or a model that scores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, modeling_utils

# How transformers' classes of models that score are called, with their architecture before.
_SCORING = "ForSequenceClassification"


def is_scoring(model_config: PretrainedConfig) -> bool:
    """Whether a configuration is that of a model that gives a sequence scores, and no text."""
    return any(name.endswith(_SCORING) for name in model_config.architectures or ())


@contextmanager
def without_first_values() -> Iterator[None]:
    """Within it, fla's constructors write no values into weights, which may have no memory.

    They ask by a name that transformers had before its fifth version.
    """
    modeling_utils._init_weights = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del modeling_utils._init_weights  # type: ignore[attr-defined]


def new_model(
    model_config: PretrainedConfig, dtype: torch.dtype, attention: str | None
) -> PreTrainedModel:
    """Makes the model of a configuration: a causal LM, or a model that scores."""
    make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    if is_scoring(model_config):
        from lacuna.model.scores import scoring_model  # an extension

        make = scoring_model
    model = make(model_config, dtype=dtype, attn_implementation=attention)
    # RWKV would divide stored weights where it does not learn, and checkpoints would have that.
    if hasattr(model.base_model, "_rescale_layers"):
        setattr(model.base_model, "_rescale_layers", _leave_as_they_are)  # noqa: B010
    return model


def _leave_as_they_are() -> None:
    """Changes no weights."""
