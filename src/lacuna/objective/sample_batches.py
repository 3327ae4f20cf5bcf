"""What a model finds of the tokens of samples, batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor
from transformers import PreTrainedModel

from lacuna.data import Batch
from lacuna.data.packing import IGNORED
from lacuna.model.build import BuiltModel
from lacuna.model.chunks import chunk_size, chunks_of
from lacuna.model.forward import Reading, head_input, run_forward
from lacuna.model.head import Head
from lacuna.model.inputs import Inputs
from lacuna.model.loss import logprobs_of
from lacuna.objective.sample_rows import LaidOut
from lacuna.parallel.context import gather_sequence
from lacuna.parallel.fsdp import inference
from lacuna.rollout.groups import Sample

# Beyond this many nats a token's log-probabilities of generating and of training differ.
_MISMATCH = 0.1


OfGroup = TypeVar("OfGroup")


def part_of_rank(groups: Sequence[OfGroup], built: BuiltModel) -> list[OfGroup]:
    """This rank's part of the groups of all, where a model is spread as `built` is."""
    ranks = built.mesh.layout.data_parallel
    rank = built.mesh.data_rank
    return [*groups[len(groups) * rank // ranks : len(groups) * (rank + 1) // ranks]]


def passed_on(
    own: Sequence[OfGroup], by: BuiltModel, to: BuiltModel, exchange: dist.ProcessGroup | None
) -> list[OfGroup]:
    """What this rank has for `to` of what ranks have for the groups that are theirs `by` another.

    All ranks must call it; they tell each other by the group `exchange`.
    """
    of_ranks: list[Sequence[OfGroup]] = [()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own, group=exchange)
    different = of_ranks[:: by.mesh.layout.sharing]  # ranks that share sequences have the same
    return part_of_rank([*chain.from_iterable(different)], to)


def values_of_tokens(
    samples: Sequence[Sample], name: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What samples know of their own tokens by the `name` of an attribute; 0 where it is empty.

    It is [own tokens of all].
    """
    values = (getattr(one, name) or [0.0] * len(one.tokens) for one in samples)
    # NumPy reads numbers faster than torch.
    return torch.from_numpy(np.fromiter(chain.from_iterable(values), np.float64)).to(dtype)


def by_sample(values: Tensor, samples: Sequence[Sample]) -> list[list[float]]:
    """The values of each sample's own tokens, of those of all, [own tokens of all]."""
    own = values.tolist()
    stops = accumulate(len(one.tokens) for one in samples)
    return [own[stop - len(one.tokens) : stop] for one, stop in zip(samples, stops, strict=True)]


@dataclass(frozen=True)
class TokenLogprobs:
    """A reading of a forward pass: the log-probability of each label at a temperature.

    It is float32 [B, T], 0 where nothing is trained, and the same on all ranks that share the rows.
    """

    temperature: float

    def __call__(self, model: PreTrainedModel, head: Head, inputs: Inputs) -> Tensor:
        """Makes logits chunk by chunk; only without gradients.

        The layers record what a backward pass would need, as `read_without_gradient` has it: ratios
        of new to old probabilities are to be 1 where nothing has changed.
        """
        with torch.enable_grad():
            states = head_input(model, head, inputs).flatten(0, 1).detach()
        labels = inputs.columns["labels"].flatten()
        linear = model.get_output_embeddings()
        given = head, states, labels, inputs.places, self.temperature
        found = run_forward(linear, _logprobs_by_chunk, *given)
        return whole_rows(found, inputs)


def _logprobs_by_chunk(
    linear: nn.Linear,
    head: Head,
    states: Tensor,
    labels: Tensor,
    places: Tensor | None,
    temperature: float,
) -> Tensor:
    weight, bias = linear.weight, linear.bias  # each of which may be cast when it is read
    found = torch.zeros(len(states), device=states.device)
    for part in chunks_of(len(states), chunk_size(weight), places):
        product = F.linear(states[part].to(weight.dtype), weight, bias)
        found[part] = logprobs_of(head.logits(product) / temperature, labels[part])
    return found


def whole_rows(found: Tensor, inputs: Inputs) -> Tensor:
    """What is `found` of each token of a rank's share [tokens], for whole rows [B, T].

    Ranks that share the rows tell each other; not differentiable.
    """
    rows = found.view(inputs.columns["labels"].shape)
    split = inputs.split
    shared = () if split is None else split.mesh_dim_names or ()
    # A context-parallel rank's share is what its tensor-parallel ranks share.
    if split is not None and "tp" in shared:
        rows = all_gather_tensor(rows.contiguous(), 1, split.get_group("tp"))
    if split is not None and "cp" in shared:
        rows = gather_sequence(rows, 1, split.get_group("cp"))
    return rows


def read_batches(asked: BuiltModel, batches: Sequence[Batch], reading: Reading) -> list[Tensor]:
    """What a `reading` finds of each batch, [tokens], on the device of the model.

    The `reading` makes it of whole rows.
    """
    found = []
    with inference(*(stage.module for stage in asked.stages)):
        for batch in batches:
            one = asked.read(batch, reading)
            assert one is not None, "without a pipeline every rank has the head"
            found.append(one.flatten())
    return found


def logprobs_of_samples(
    asked: BuiltModel, laid: LaidOut, samples: Sequence[Sample], temperature: float
) -> list[list[float]]:
    """The log-probabilities of the tokens of each sample, by a model; 0 where not trained."""
    found = read_batches(asked, laid.batches, TokenLogprobs(temperature))
    return of_samples(found, laid, samples)


def of_samples(
    found: Sequence[Tensor], laid: LaidOut, samples: Sequence[Sample]
) -> list[list[float]]:
    """The part of each sample in what was `found` of the batches, [tokens] each, by labels."""
    return by_sample(torch.cat([*found]).cpu()[torch.from_numpy(laid.places)], samples)


def mismatch_of(trained: Sequence[Sample], device: torch.device) -> dict[str, float | None]:
    """How log-probabilities of generating and training differ, over all ranks' trained samples.

    There is None where no rank has any.
    """
    sampled, old = (values_of_tokens(trained, name) for name in ("sampled", "old"))
    apart = (sampled - old).abs().to(device)
    largest = apart.max() if len(apart) else apart.sum()
    sums = torch.stack([apart.sum(), (apart > _MISMATCH).sum(), apart.new_tensor(len(apart))])
    dist.all_reduce(sums)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    total, beyond, count = sums.tolist()
    if not count:
        return dict.fromkeys(("mismatch_mean", "mismatch_largest", "mismatch_share"))
    return {
        "mismatch_mean": total / count,
        "mismatch_largest": largest.item(),
        "mismatch_share": beyond / count,
    }


def with_log_ratios(policy: BuiltModel, batch: Batch, temperature: float) -> Batch:
    """The batch with the column `log_ratios` of gspo: the mean over a completion's tokens.

    It is of the log-probabilities that the model finds now, less the old ones.
    """
    [found] = read_batches(policy, [batch], TokenLogprobs(temperature))
    labels = batch.columns["labels"]
    trained = (labels.flatten() != IGNORED).to(found.device).float()
    difference = (found - batch.columns["old_logprobs"].flatten().to(found.device)) * trained
    pieces = batch.cu_seqlens.diff().to(found.device)
    numbers = torch.arange(len(pieces), device=found.device).repeat_interleave(pieces)
    sums = difference.new_zeros(len(pieces), 2)
    sums = sums.index_add(0, numbers, torch.stack([difference, trained], dim=1))
    means = sums[:, 0] / sums[:, 1].clamp(min=1)
    column = (means[numbers] * trained).view(labels.shape)
    return replace(batch, columns=batch.columns | {"log_ratios": column})
