"""Forward passes of one rank's share of a micro-batch: loss sums, log-probabilities, states."""

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel

from lacuna.data.packing import IGNORED
from lacuna.model.head import Head
from lacuna.model.inputs import Inputs
from lacuna.model.loss import (
    Loss,
    SequenceLoss,
    chunked_logprobs,
    chunked_sums,
    logprobs_of,
    stacked,
)
from lacuna.parallel.backbone import backbone
from lacuna.parallel.tensor import gather_sequence_slices

Reading = Callable[[PreTrainedModel, Head, Inputs], Tensor]
"""Makes of a forward pass what is wanted of it; with a pipeline, the last stage calls it."""

_METHOD = "run_forward"


def attach_forward(model: PreTrainedModel) -> None:
    """Gives `model` and its head, in place, the method that `run_forward` calls."""
    for module in (model, model.get_output_embeddings()):
        if module is not None:
            setattr(module, _METHOD, MethodType(_call_with, module))
            register_fsdp_forward_method(module, _METHOD)


def run_forward(module: nn.Module, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Calls `function(module, *arguments)` as a forward pass of a model or of its head.

    It goes by a method of theirs, so that sharding gathers what they need.
    """
    return cast(Tensor, getattr(module, _METHOD)(function, *arguments))


def _call_with(module: nn.Module, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(module, *arguments)


def hidden_states(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The hidden states [B, T, width] that the backbone hands to its head or to the next stage."""
    states: Tensor = backbone(model)(**inputs.arguments).last_hidden_state
    return states


def head_input(model: PreTrainedModel, head: Head, inputs: Inputs) -> Tensor:
    """The hidden states [B, T, width] that the head is given.

    They are those of whole sequences where these are gathered first.
    """
    states = hidden_states(model, inputs)
    return states if inputs.gather is None else gather_sequence_slices(states, inputs.gather)


def loss_sums(
    model: PreTrainedModel,
    head: Head,
    inputs: Inputs,
    loss: Loss,
) -> Tensor:
    """This rank's share of the sums of `loss` over `inputs`, float32 [names of the loss].

    The sums are over tokens or over sequences. Ranks that share sequences all make the same sums of
    whole sequences, and each takes an equal share of them.
    """
    states = _hidden_states(head, run_backbone(model, head, inputs), inputs)
    columns = {name: column.flatten(0, 1) for name, column in inputs.columns.items()}
    if isinstance(loss, SequenceLoss):
        found = {}
        if loss.of_scores:
            from lacuna.model.scores import sequence_scores  # an extension

            values = sequence_scores(model, inputs, states)
            if inputs.split is not None:
                values = sum_over_ranks(values, inputs.split)
        else:
            found = _sums_by_sequence(model, head, inputs, states)
            values = found.pop("logprobs")
        sums = stacked(loss.of(values, inputs.sequence_columns | found), loss.names)
        if inputs.split is not None:
            sums = sums / inputs.split.size()
    elif head.chunked:
        linear = model.get_output_embeddings()
        sums = run_forward(linear, chunked_sums, head, loss, states, columns, inputs.places)
    else:
        sums = stacked(loss.of(head.logits(states), columns), loss.names)
    if inputs.gather is not None:
        sums = sums / inputs.gather.size()
    return sums


def sequence_logprobs(model: PreTrainedModel, head: Head, inputs: Inputs) -> Tensor:
    """The log-probability of each sequence's labels, float32 [sequences].

    Every rank that shares the sequences has all of them.
    """
    states = _hidden_states(head, run_backbone(model, head, inputs), inputs)
    return _sums_by_sequence(model, head, inputs, states)["logprobs"]


def run_backbone(model: PreTrainedModel, head: Head, inputs: Inputs) -> Any:
    """What the backbone returns, or the whole model where lacuna does not know the head."""
    if head.chunked:
        return backbone(model)(**inputs.arguments)
    return type(model).forward(model, **inputs.arguments)


def _hidden_states(head: Head, output: Any, inputs: Inputs) -> Tensor:
    """The hidden states [tokens, width] of an output.

    Where lacuna does not know the head, they are the model's logits [tokens, vocabulary] instead.
    """
    states: Tensor = output.last_hidden_state if head.chunked else output.logits
    if inputs.gather is not None:
        states = gather_sequence_slices(states, inputs.gather)
    return states.flatten(0, 1)


def _sums_by_sequence(
    model: PreTrainedModel, head: Head, inputs: Inputs, states: Tensor
) -> dict[str, Tensor]:
    """The `logprobs` of each sequence's labels and the number of its `tokens`, float32 [sequences].

    Where the inputs have `prompt_labels`, there are also `prompt_logprobs` and `prompt_tokens`, of
    the tokens that are not trained.
    """
    columns = {name: column.flatten() for name, column in inputs.columns.items()}
    kinds = {"": columns["labels"]}
    targets = columns["labels"]
    if "prompt_labels" in columns:
        kinds["prompt_"] = columns["prompt_labels"]
        targets = torch.where(targets == IGNORED, columns["prompt_labels"], targets)
    if head.chunked:
        linear = model.get_output_embeddings()
        logprobs = run_forward(linear, chunked_logprobs, head, states, targets, inputs.places)
    else:
        logprobs = logprobs_of(head.logits(states), targets)
    values = {}
    for kind, labels in kinds.items():
        is_one = (labels != IGNORED).float()
        values[f"{kind}logprobs"] = logprobs * is_one
        values[f"{kind}tokens"] = is_one
    count = len(next(iter(inputs.sequence_columns.values())))
    # Padding belongs to the first sequence, if there is one.
    sums = logprobs.new_zeros(max(count, 1), len(values))
    sums = sums.index_add(0, columns["sequence"], torch.stack([*values.values()], dim=1))
    if inputs.split is not None:
        sums = sum_over_ranks(sums, inputs.split)
    return dict(zip(values, sums[:count].unbind(1), strict=True))


def sum_over_ranks(share: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sums the shares of all ranks of `mesh`; every rank gets the sum.

    The gradient is summed over the ranks likewise, so that what is made of the sum must be divided
    by their number.
    """
    partial = [Partial()] * mesh.ndim
    whole = DTensor.from_local(share, mesh, partial, run_check=False)
    return whole.full_tensor(grad_placements=partial)
