"""What is left out in training is dropout, of every kind that a model of transformers has."""

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from every_model import configuration_class, model_types, small_config
from lacuna.config import UserError
from lacuna.model.specimen import specimen
from lacuna.objective.dropout import leave_out_dropout
from tiny import random_model

READS_ITS_CONFIGURATION = {"big_bird", "falcon", "fuyu", "persimmon"}
"""Models that look up their dropout in the configuration in each forward pass."""
DRAWS_ANYWAY = {"phimoe"}
"""Models whose router draws at random in training."""


def with_dropout(kind: str) -> PretrainedConfig:
    """A small configuration in which all that is called dropout is half."""
    config = small_config(configuration_class(kind))
    text = config.get_text_config()
    for name, value in vars(text).items():
        if "drop" in name and isinstance(value, int | float):
            setattr(text, name, 0.5)
    return config


@torch.no_grad()
def differs_in_training(model: PreTrainedModel) -> bool:
    ids = torch.arange(1, 17).view(1, 16)
    torch.manual_seed(0)
    outputs = [model.train(mode)(input_ids=ids, use_cache=False).logits for mode in (False, True)]
    return not torch.allclose(*outputs, rtol=1e-4, atol=1e-5)


def is_left_out_or_refused(kind: str) -> str:
    model = random_model(with_dropout(kind), "eager")
    try:
        leave_out_dropout(model)
    except UserError:
        return "refused"
    return "drawn" if differs_in_training(model) else "left out"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt"])
def test_dropout_is_left_out(kind: str) -> None:
    assert differs_in_training(random_model(with_dropout(kind), "eager")), "it has dropout"
    assert is_left_out_or_refused(kind) == "left out"


def test_what_cannot_be_left_out_is_refused() -> None:
    assert is_left_out_or_refused("falcon") == "refused"
    assert is_left_out_or_refused("phimoe") == "refused"


def is_tried(kind: str) -> bool:
    """Whether lacuna can try a kind in small, as it does before each run: it trains no other."""
    try:
        specimen(with_dropout(kind)).train()(input_ids=torch.ones(1, 16, dtype=torch.long))
    except Exception:  # whatever models raise
        return False
    return True


@pytest.mark.slow
def test_no_model_draws_at_random_in_training() -> None:
    kinds = [kind for kind in model_types() if is_tried(kind)]
    assert len(kinds) > 130
    found = {kind: is_left_out_or_refused(kind) for kind in kinds}
    refused = {kind for kind, what in found.items() if what == "refused"}
    assert refused <= READS_ITS_CONFIGURATION | DRAWS_ANYWAY
    assert {what for kind, what in found.items() if kind not in refused} == {"left out"}
