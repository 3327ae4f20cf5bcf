"""Tries on a small model whether sequences can be cut over ranks, and layers into stages."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lacuna.config import UserError
from lacuna.data import Batch
from lacuna.model.architecture import causal_class, is_from_fla
from lacuna.model.attention import PACKED, packed_attention
from lacuna.model.forward import hidden_states
from lacuna.model.inputs import packing_arguments, prepare_inputs
from lacuna.model.probe import (
    Result,
    Rows,
    find_attention,
    own_result,
    reason_against,
    result_in_rows,
    trial_of,
)
from lacuna.model.specimen import LENGTH, found_once, specimen_and_layers
from lacuna.parallel.backbone import backbone
from lacuna.parallel.context import join_sequence, shard_sequence
from lacuna.parallel.mesh import Layout
from lacuna.parallel.stages import stage_of

SHARED = "lacuna_shared"
RANKS = 2


def shared_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **told: Any
) -> tuple[Tensor, None]:
    """Computes attention of whole rows for a model that takes the shares of two ranks as its rows.

    So all but attention sees what a context-parallel rank sees. `query` is [2 * B, heads, T / 2,
    D].
    """
    query, key, value = (join_sequence(one.chunk(RANKS), 2) for one in (query, key, value))
    output, _ = packed_attention(module, query, key, value, mask, **told)
    return _shares_in_order(output), None


States = Callable[[PreTrainedModel, nn.ModuleList, Batch], Tensor]

AttentionInterface.register(SHARED, shared_attention)


def require_shareable(
    model_config: PretrainedConfig,
    layout: Layout,
    rows: Rows,
    longest: int,
    device: torch.device,
) -> None:
    """Raises `UserError` where context or pipeline parallelism would change what a model computes.

    That is so where something else than attention passes information from token to token (a
    convolution, a state), or where other layers than the next one use what a layer has made.
    """
    kind = causal_class(model_config).__name__
    trial = trial_of(model_config, rows)
    tried: dict[str, tuple[str, States]] = {}
    if layout.cp > 1:
        tried["context_parallel_degree"] = (SHARED, _states_by_shares)
    if layout.pp > 1:
        tried["pipeline_parallel_degree"] = (PACKED, _states_by_stages)
    for setting, (attention, states) in tried.items():

        def shared(attention: str = attention, states: States = states) -> Result:
            model, layers = specimen_and_layers(
                model_config, attention, longest, device, least=RANKS
            )
            return result_in_rows(model, states(model, layers, trial.batch), trial)

        own = own_result(model_config, longest, trial, device, least=RANKS)
        reason = reason_against(shared, own)
        if reason is not None:
            raise UserError(
                f"parallelism.{setting}: shared out like that, {kind} would compute something else "
                f"({reason}): use other parallelisms."
            )


def _shares_in_order(whole: Tensor) -> Tensor:
    """The shares of all ranks, one behind the other, of a tensor whole along dimension 1."""
    return torch.cat([shard_sequence(whole, 1, RANKS, rank) for rank in range(RANKS)])


def _states_by_shares(model: PreTrainedModel, _: nn.ModuleList, batch: Batch) -> Tensor:
    """The hidden states of whole rows, computed in the shares of two ranks."""
    bounds = (batch.cu_seqlens, batch.max_seqlen, LENGTH)
    told = packing_arguments(PACKED, *bounds, model.device)
    names = ("input_ids", "position_ids")
    arguments = {name: _shares_in_order(batch.columns[name].to(model.device)) for name in names}
    states = backbone(model)(**arguments, use_cache=False, **told).last_hidden_state
    return join_sequence(states.chunk(RANKS), 1)


def _states_by_stages(model: PreTrainedModel, layers: nn.ModuleList, batch: Batch) -> Tensor:
    """The hidden states of whole rows, computed by the two stages of a pipeline."""
    half = len(layers) // 2
    ranges = [range(half), range(half, len(layers))]
    first, last = (stage_of(model, layers, ranges, index) for index in range(RANKS))
    inputs = prepare_inputs(batch, PACKED, model.device)
    last.entrance.received = hidden_states(first.module, inputs)
    return hidden_states(last.module, inputs)


def tried_attention(
    names: Sequence[str],
    model_config: PretrainedConfig,
    rows: Rows,
    longest: int,
    dtype: torch.dtype,
    layout: Layout,
    device: torch.device,
) -> str:
    """The first of these attentions with which a small model, also in shares, is exact."""
    functions = tuple(ALL_ATTENTION_FUNCTIONS.get(name) for name in names)
    told = *names, *functions, rows, longest, device, dtype
    tried = names, model_config, rows, longest, device, dtype
    if is_from_fla(model_config):
        from lacuna.model.linear_attention import find_bounds  # an extension

        find = partial(find_bounds, *tried, layout)
        return found_once(model_config, (*told, layout.pp > 1), find)
    attention = found_once(model_config, told, partial(find_attention, *tried))
    for shared in (Layout(cp=layout.cp), Layout(pp=layout.pp)):
        how = shared, rows, longest, device
        found_once(model_config, how, partial(require_shareable, model_config, *how))
    return attention
