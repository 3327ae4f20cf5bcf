"""Layers' inputs in CPU memory change no gradient, come back in time, and do not stay."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model.architecture import decoder_layers
from lacuna.parallel import offload
from lacuna.parallel.offload import offload_inputs
from lacuna.parallel.recompute import recompute
from tiny import random_model, tiny_config

LAYERS = 4
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


def deep_model(device: str) -> PreTrainedModel:
    """A model whose layers keep their inputs only."""
    model = random_model(tiny_config("llama", num_hidden_layers=LAYERS)).to(device).train()
    recompute(decoder_layers(model), ActivationCheckpointConfig(mode="full"))
    return model


def gradients(model: PreTrainedModel, times: int = 3) -> list[Tensor]:
    """The gradients of some passes, each over other tokens."""
    device = next(model.parameters()).device
    for number in range(times):
        tokens = (torch.arange(64, device=device)[None] * (number + 1)) % 60
        output: Any = model(input_ids=tokens, use_cache=False)
        output.logits.square().mean().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_the_same_to_the_bit(device: str) -> None:
    plain = gradients(deep_model(device))
    model = deep_model(device)
    offload_inputs(model, device)
    for ours, theirs in zip(gradients(model), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_each_comes_back_while_the_one_after_it_is_used_and_none_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[weakref.ref[Any]] = []
    was_on_its_way: list[bool] = []
    most = 0
    pack, unpack = offload._Keeper.pack, offload._Keeper.unpack

    def noted(keeper: Any, tensor: Tensor) -> Any:
        packed = pack(keeper, tensor)
        if not isinstance(packed, Tensor):
            kept.append(weakref.ref(packed))
        return packed

    def counted(keeper: Any, packed: Any) -> Tensor:
        nonlocal most
        if not isinstance(packed, Tensor):
            was_on_its_way.append(packed.fetched is not None)
        tensor = unpack(keeper, packed)
        most = max(most, sum(one.fetched is not None for ref in kept if (one := ref())))
        return tensor

    monkeypatch.setattr(offload._Keeper, "pack", noted)
    monkeypatch.setattr(offload._Keeper, "unpack", counted)
    model = deep_model("cpu")
    offload_inputs(model, "cpu")
    gradients(model, times=1)
    gc.collect()
    assert len(was_on_its_way) == len(kept) > LAYERS
    assert all(was_on_its_way[-LAYERS:]), "the layers' inputs are asked for last"
    assert most <= 2
    assert not any(ref() for ref in kept)


def test_nothing_is_kept_of_a_pass_that_is_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are found with gradients recorded, and no backward pass."""
    kept: list[Tensor] = []
    monkeypatch.setattr(offload._Keeper, "pack", lambda _, tensor: kept.append(tensor) or tensor)
    model = deep_model("cpu").eval()
    offload_inputs(model, "cpu")
    model(input_ids=torch.arange(64)[None] % 60, use_cache=False)
    assert not kept
