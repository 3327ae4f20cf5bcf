"""The loss is the one that the model's own logits give, whatever the model does to them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.model.forward import attach_forward, loss_sums
from lacuna.model.head import probe_head
from lacuna.model.inputs import Inputs
from lacuna.model.specimen import specimen
from lacuna.objective.language_modelling import LanguageModelling
from tiny import VOCABULARY, own_loss, random_model, tiny_config

IDS = torch.arange(36).view(2, 18) * 5 % VOCABULARY
POSITIONS = torch.arange(18).expand(2, 18)
LABELS = IDS.roll(-1, dims=1).masked_fill(IDS % 4 == 0, -100)
INPUTS = Inputs({"input_ids": IDS, "position_ids": POSITIONS}, {"labels": LABELS})


def prepared(
    architecture: str, change: Callable[[PreTrainedModel], None] = lambda model: None
) -> PreTrainedModel:
    """A model with logits large enough for soft caps to bend them, with `change` applied to it."""
    model = random_model(tiny_config(architecture), "eager")
    model.get_output_embeddings().weight.data.mul_(20)
    change(model)
    return model


def loss_and_gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def check_loss(model: PreTrainedModel, chunked: bool) -> None:
    head = probe_head(model, compiled=False)
    assert head.chunked == chunked
    expected = own_loss(model, IDS, POSITIONS, LABELS)
    attach_forward(model)
    loss = model.run_forward(loss_sums, head, INPUTS, LanguageModelling.loss)[0]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = loss_and_gradients(model, loss)
    for name, gradient in loss_and_gradients(model, expected).items():
        assert torch.allclose(
            gradients[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item()
        ), name


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere", "granite", "phi", "gpt2"])
def test_the_chunked_loss_equals_the_loss_of_the_models_own_logits(architecture: str) -> None:
    check_loss(prepared(architecture), chunked=True)


@pytest.mark.parametrize("architecture", ["gemma2", "cohere", "granite"])
def test_the_transform_matters_in_these_tests(architecture: str) -> None:
    model = prepared(architecture)
    head = probe_head(model, compiled=False)
    attach_forward(model)
    with torch.no_grad():
        bare = replace(head, scale=1.0, soft_cap=None)
        losses = [
            model.run_forward(loss_sums, each, INPUTS, LanguageModelling.loss)[0].item()
            for each in (head, bare)
        ]
    assert losses[1] != pytest.approx(losses[0], rel=0.05)


def replaced_forward(model: PreTrainedModel, function: Callable[[Tensor], Tensor]) -> None:
    """Makes a subclass of the model that applies `function` to its logits, as some models do."""

    class Changed(type(model)):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            output = super().forward(*arguments, **named)
            output.logits = function(output.logits)
            return output

    model.__class__ = Changed


class ScaledLinear(nn.Linear):
    """A linear layer that does more than its weight says, as an adapter would."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 1.5 * super().forward(hidden)


def scale_head(model: PreTrainedModel) -> None:
    model.get_output_embeddings().__class__ = ScaledLinear


def hook_head(model: PreTrainedModel) -> None:
    model.get_output_embeddings().register_forward_hook(
        lambda module, arguments, output: output * 1.5
    )


def scale_input(model: PreTrainedModel) -> None:
    model.get_output_embeddings().register_forward_pre_hook(
        lambda module, arguments: (arguments[0] * 0.5,)
    )


def wrap_head(model: PreTrainedModel) -> None:
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, 32), model.get_output_embeddings()))


UNKNOWN_HEADS: dict[str, Callable[[PreTrainedModel], None]] = {
    "scaled logits": lambda model: replaced_forward(model, lambda logits: logits * 1.5),
    "soft cap": lambda model: replaced_forward(model, lambda logits: 10 * torch.tanh(logits / 10)),
    "clamp": lambda model: replaced_forward(model, lambda logits: logits.clamp(-5, 5)),
    "shift": lambda model: replaced_forward(
        model, lambda logits: logits + torch.arange(VOCABULARY) / 10
    ),
    "scaled input": scale_input,
    "hooked head": hook_head,
    "head of another class": scale_head,
    "head of two layers": wrap_head,
}


@pytest.mark.parametrize("change", UNKNOWN_HEADS.values(), ids=UNKNOWN_HEADS.keys())
def test_a_head_that_does_more_than_is_known_falls_back_to_the_models_own_logits(
    change: Callable[[PreTrainedModel], None],
) -> None:
    check_loss(prepared("llama", change), chunked=False)


def test_a_scale_that_the_configuration_does_not_tell_falls_back() -> None:
    def change(model: PreTrainedModel) -> None:
        model.logit_scale = 0.5

    check_loss(prepared("cohere", change), chunked=False)


@pytest.mark.parametrize("architecture", ["bloom", "falcon", "mamba", "modernbert"])
def test_a_model_is_tried_out_whatever_its_layers_return_and_its_configuration_lacks(
    architecture: str,
) -> None:
    tried = specimen(tiny_config(architecture))
    assert probe_head(tried, compiled=False).chunked == (architecture != "modernbert"), (
        "which has more than one matrix"
    )
