"""One process keeps its model whole, and computes in another precision than it stores."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.model.architecture import decoder_layers
from lacuna.model.layers.casting import compute_in
from tiny import random_model, tiny_config

IDS = (torch.arange(32) * 7 % 89).view(2, 16)


def step(model: PreTrainedModel) -> tuple[float, dict[str, Tensor]]:
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt2", "gemma3", "qwen3_moe"])
def test_it_computes_as_a_model_of_that_precision_and_keeps_its_own(architecture: str) -> None:
    mixed = random_model(tiny_config(architecture)).train()
    cast = copy.deepcopy(mixed)
    for (
        parameter
    ) in cast.parameters():  # not buffers, which keep their precision when a model is trained
        parameter.data = parameter.data.bfloat16()
    compute_in(mixed, torch.bfloat16)
    (loss, grads), (expected, expected_grads) = step(mixed), step(cast)
    # Gemma scales what it has looked up, which is rounded once here and twice there.
    assert (
        loss == expected or architecture == "gemma3" and loss == pytest.approx(expected, rel=1e-3)
    )
    assert grads.keys() == expected_grads.keys()
    for name, parameter in mixed.named_parameters():
        assert parameter.dtype == grads[name].dtype == torch.float32
        error = (grads[name] - expected_grads[name].float()).norm() / grads[name].norm()
        assert error < 0.02 * (1 + 4 * (architecture == "gemma3")), name


def test_its_layers_share_one_compiled_graph() -> None:
    model = random_model(tiny_config("llama", num_hidden_layers=4)).train()
    loss, grads = step(copy.deepcopy(model))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, backend="aot_eager")
    compute_in(model, torch.bfloat16)
    compiled_loss, compiled_grads = step(model)
    assert counters["stats"]["unique_graphs"] == 1
    assert compiled_loss == pytest.approx(loss, rel=0.02)
    for name, grad in grads.items():
        assert (compiled_grads[name] - grad).norm() < 0.1 * grad.norm(), name
