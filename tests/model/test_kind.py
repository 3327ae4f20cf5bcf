"""What lacuna makes of a configuration is transformers' model, which leaves its weights alone."""

import pytest
import torch
from transformers import PreTrainedModel

from every_model import NO_SPECIMEN, configuration_class, model_types, small_config
from lacuna.model.kind import new_model


def read_by(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("kind", sorted({*model_types()} - NO_SPECIMEN))
def test_no_model_changes_its_weights_where_it_does_not_learn(kind: str) -> None:
    small = small_config(configuration_class(kind))
    if hasattr(small, "rescale_every"):
        small.rescale_every = 1
    model = new_model(small, torch.float32, "eager")
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    for _ in range(2):
        read_by(model.train())
        read_by(model.eval())
    changed = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
    assert not changed


def test_rwkv_finds_the_same_whether_it_learns_or_not() -> None:
    small = small_config(configuration_class("rwkv"))
    small.rescale_every = 1
    model = new_model(small, torch.float32, None)
    assert torch.equal(read_by(model.train()), read_by(model.eval()))
