"""Losses and log-probabilities are those of all tokens, though logits of others are not made."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lacuna.data import Batch
from lacuna.data.packing import IGNORED
from lacuna.model.build import BuiltModel
from lacuna.model.forward import loss_sums, sequence_logprobs
from lacuna.model.head import Head
from lacuna.model.inputs import Inputs
from lacuna.model.layers.casting import compute_in
from lacuna.model.layers.wrapping import stored_parameter
from lacuna.model.loss import Columns, Loss, SequenceLoss, Sums
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.objective.sample_batches import TokenLogprobs
from policies import batch_of, one_rank, policy_of
from tiny import random_model, tiny_config

PAIRS = batch_of(
    [([5, 6, 3, 4], [7, 8, 9]), ([3], [4, 2]), ([9, 9, 1], [4])],
    {"chosen": [1.0, 0.0, 1.0]},
)
PROMPTS = torch.full_like(PAIRS.columns["labels"], IGNORED)
PROMPTS[0, :3] = torch.tensor([6, 3, 4])


def without_labels(batch: Batch, kept: int = 0) -> Batch:
    labels = batch.columns["labels"].clone()
    trained = (labels.flatten() != IGNORED).nonzero().flatten()
    labels.view(-1)[trained[kept:]] = IGNORED
    return replace(batch, columns=batch.columns | {"labels": labels})


BATCHES = {
    "some": PAIRS,
    "one": without_labels(PAIRS, 1),
    "none": without_labels(PAIRS),
    "prompts too": replace(PAIRS, columns=PAIRS.columns | {"prompt_labels": PROMPTS}),
}


def squares(logprobs: Tensor, columns: Columns) -> Sums:
    values = logprobs.square() / columns["tokens"].clamp(min=1)
    if "prompt_logprobs" in columns:
        values = values + columns["prompt_logprobs"] * columns["prompt_tokens"]
    return {"loss": values.sum(), "chosen": (values * columns["chosen"]).sum()}


LOSSES: dict[str, Loss] = {
    "of tokens": LanguageModelling.loss,
    "of sequences": SequenceLoss(squares, ("loss", "chosen")),
}


class NotedHead(Head):
    """Notes of how many tokens logits are made."""

    made: list[int] = []

    def logits(self, product: Tensor) -> Tensor:
        self.made.append(len(product))
        return super().logits(product)


@pytest.fixture(params=["llama", "gemma2", "phi"])  # plain, with a soft cap, with a bias
def built(request: pytest.FixtureRequest) -> Iterator[BuiltModel]:
    NotedHead.made.clear()
    with one_rank():
        policy = policy_of(random_model(tiny_config(request.param), "eager"))
        yield replace(policy, head=NotedHead(**vars(policy.head)))


def read(built: BuiltModel, inputs: Inputs, reading: Callable[..., Tensor]) -> Any:
    """What is found, how many logits were made, and the gradients of its first value."""
    NotedHead.made.clear()
    built.model.zero_grad()
    with torch.set_grad_enabled(not isinstance(reading, TokenLogprobs)):
        found = built.model.run_forward(reading, built.head, inputs)
    made = sum(NotedHead.made)
    if found.requires_grad:
        found.flatten()[0].backward()
    gradients = [
        torch.zeros_like(one) if one.grad is None else one.grad.clone()
        for one in built.model.parameters()
    ]
    return found.detach(), made, gradients, [one.grad is None for one in built.model.parameters()]


READINGS: dict[str, Callable[..., Tensor]] = {
    **{name: partial(loss_sums, loss=loss) for name, loss in LOSSES.items()},
    "log-probabilities of sequences": sequence_logprobs,
    "log-probabilities of tokens": TokenLogprobs(0.7),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS.keys())
def test_what_is_read_of_trained_tokens_is_what_is_read_of_all(
    name: str, reading: Callable[..., Tensor], built: BuiltModel
) -> None:
    batch = BATCHES[name]
    inputs = built.inputs(batch)
    learnt = batch.columns["labels"] != IGNORED
    if "prompt_labels" in batch.columns:
        learnt = learnt | (batch.columns["prompt_labels"] != IGNORED)
    found, made, gradients, missing = read(built, inputs, reading)
    expected, made_of_all, wanted, missing_of_all = read(
        built, replace(inputs, places=None), reading
    )
    torch.testing.assert_close(found, expected)
    assert (made, made_of_all) == (int(learnt.sum()), learnt.numel())
    assert missing == missing_of_all
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_held_out_sums_are_those_of_all_tokens(loss: Loss, built: BuiltModel) -> None:
    inputs = built.inputs(PAIRS)
    with torch.no_grad():
        found, expected = (
            built.model.run_forward(partial(loss_sums, loss=loss), built.head, one)
            for one in (inputs, replace(inputs, places=None))
        )
    assert sum(NotedHead.made) == len(inputs.places) + PAIRS.columns["labels"].numel()
    torch.testing.assert_close(found, expected)


class Casts(TorchDispatchMode):
    """Notes the shapes of what becomes bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, function: Any, kinds: Any, given: Any = (), options: Any = None):
        found = function(*given, **(options or {}))
        if function is torch.ops.aten._to_copy.default and found.dtype == torch.bfloat16:
            self.shapes.append(found.shape)
        return found


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS.keys())
def test_the_heads_weight_is_cast_once(reading: Callable[..., Tensor], built: BuiltModel) -> None:
    """It is a large one, and a module casts its weight wherever it is asked for it."""
    compute_in(built.model, torch.bfloat16)
    head = stored_parameter(built.model.get_output_embeddings(), "weight")
    with Casts() as casts:
        built.model.run_forward(reading, built.head, built.inputs(PAIRS))
    assert casts.shapes.count(head.shape) == 1
