"""A forward pass of one rank's share of a micro-batch, and what is made of it: sums, log-probabilities, states."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
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
from lacuna.model.router import router_loss
from lacuna.parallel.backbone import backbone
from lacuna.parallel.tensor import gather_sequence_slices

Reading = Callable[[PreTrainedModel, Head, Inputs], Tensor]
"""What is wanted of a forward pass; with a pipeline, of its last stage."""


def attach_forward(model: PreTrainedModel) -> None:
    """Gives `model` and its head, in place, a method `run_forward(function, ...)`.

    A method of theirs and not a function around them, so that sharding gathers what they need.
    """
    for module in (model, model.get_output_embeddings()):
        if module is not None:
            module.run_forward = MethodType(_run, module)
            register_fsdp_forward_method(module, "run_forward")


def _run(module: nn.Module, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(module, *arguments)


def hidden_states(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """What the backbone makes [B, T, width]: what its head is given, or another stage of a pipeline."""
    return backbone(model)(**inputs.arguments).last_hidden_state


def head_input(model: PreTrainedModel, head: Head, inputs: Inputs) -> Tensor:
    """What the head is given [B, T, width], of whole sequences where these are gathered first."""
    states = hidden_states(model, inputs)
    return states if inputs.gather is None else gather_sequence_slices(states, inputs.gather)


def loss_sums(
    model: PreTrainedModel,
    head: Head,
    inputs: Inputs,
    loss: Loss,
    divisor: Tensor | None = None,
) -> Tensor:
    """This rank's share of the sums of `loss` over the tokens or sequences of `inputs`, float32 [names].

    Ranks that share sequences make the same sums of whole sequences, and each takes an equal share.
    Where the head has a router and `divisor` says by what the loss will be divided, its own loss is
    added as often.
    """
    output = _output(model, head, inputs)
    states = _states(head, output, inputs)
    columns = {name: column.flatten(0, 1) for name, column in inputs.columns.items()}
    if isinstance(loss, SequenceLoss):
        found = _sums_by_sequence(model, head, inputs, states)
        logprobs = found.pop("logprobs")
        sums = stacked(loss.of(logprobs, inputs.sequence_columns | found), loss.names)
        if inputs.split is not None:
            sums = sums / inputs.split.size()
    elif head.chunked:
        sums = model.get_output_embeddings().run_forward(chunked_sums, head, loss, states, columns)
    else:
        sums = stacked(loss.of(head.logits(states), columns), loss.names)
    if inputs.gather is not None:
        sums = sums / inputs.gather.size()
    if head.router is not None and divisor is not None:
        balance = router_loss(head.router, output.router_logits, columns["real"])
        sums = sums + F.pad((balance * divisor)[None], (0, len(loss.names) - 1))
    return sums


def sequence_logprobs(model: PreTrainedModel, head: Head, inputs: Inputs) -> Tensor:
    """The log-probability of the labels of each sequence, float32 [sequences], on every rank that shares them."""
    states = _states(head, _output(model, head, inputs), inputs)
    return _sums_by_sequence(model, head, inputs, states)["logprobs"]


def _output(model: PreTrainedModel, head: Head, inputs: Inputs) -> Any:
    """What the backbone makes, or where lacuna does not know the head, the whole model."""
    if head.chunked:
        return backbone(model)(**inputs.arguments)
    return type(model).forward(model, **inputs.arguments)


def _states(head: Head, output: Any, inputs: Inputs) -> Tensor:
    """Hidden states [tokens, width], or logits [tokens, vocabulary] where lacuna does not know the head."""
    states = output.last_hidden_state if head.chunked else output.logits
    if inputs.gather is not None:
        states = gather_sequence_slices(states, inputs.gather)
    return states.flatten(0, 1)


def _sums_by_sequence(
    model: PreTrainedModel, head: Head, inputs: Inputs, states: Tensor
) -> dict[str, Tensor]:
    """Of each sequence, float32 [sequences], the `logprobs` of its labels and the number of `tokens`.

    Where the inputs have `prompt_labels`, also `prompt_logprobs` and `prompt_tokens`, those of the
    tokens that are not trained.
    """
    columns = {name: column.flatten() for name, column in inputs.columns.items()}
    kinds = {"": columns["labels"]}
    targets = columns["labels"]
    if "prompt_labels" in columns:
        kinds["prompt_"] = columns["prompt_labels"]
        targets = torch.where(targets == IGNORED, columns["prompt_labels"], targets)
    if head.chunked:
        logprobs = model.get_output_embeddings().run_forward(
            chunked_logprobs, head, states, targets
        )
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
    """The sum of what all ranks of `mesh` have, the same on each.

    Its gradient is summed over them likewise: what is made of the sum must be divided among them.
    """
    partial = [Partial()] * mesh.ndim
    whole = DTensor.from_local(share, mesh, partial, run_check=False)
    return whole.full_tensor(grad_placements=partial)
