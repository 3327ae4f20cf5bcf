"""Tries in small whether a model can be shared out: sequences over ranks, layers over stages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from lacuna.config import Config, UserError
from lacuna.data import Batch
from lacuna.model.attention import PACKED, packed_attention
from lacuna.model.forward import hidden_states
from lacuna.model.inputs import packing_arguments, prepare_inputs
from lacuna.model.probe import (
    Result,
    longest_position,
    own_result,
    reason_against,
    result_in_rows,
    rows_of,
    trial_of,
)
from lacuna.model.specimen import LENGTH, specimen_and_layers
from lacuna.parallel.backbone import backbone
from lacuna.parallel.context import join_sequence, shard_sequence
from lacuna.parallel.mesh import Layout
from lacuna.parallel.pipeline import stage_of

SHARED = "lacuna_shared"
RANKS = 2


def shared_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **told: Any
) -> tuple[Tensor, None]:
    """Attention of whole rows, for a model that runs on the shares of two ranks as on more rows.

    All but attention then sees what a context-parallel rank sees. `query` [2 * B, heads, T / 2, D].
    """
    whole = (join_sequence(one.chunk(RANKS), 2) for one in (query, key, value))
    output, _ = packed_attention(module, *whole, mask, **told)
    return _shares(output), None


States = Callable[[PreTrainedModel, nn.ModuleList, Batch], Tensor]

AttentionInterface.register(SHARED, shared_attention)


def require_shareable(
    model_config: PretrainedConfig, config: Config, layout: Layout, device: torch.device
) -> None:
    """Raises `UserError` where context or pipeline parallelism would change what a model computes.

    That is where more than attention passes something from token to token (a convolution, a
    state), or where more than the next layer goes by what a layer has made.
    """
    kind = AutoModelForCausalLM._model_mapping[type(model_config)].__name__
    longest = longest_position(config)
    trial = trial_of(rows_of(config))
    tried = {}
    if layout.cp > 1:
        tried["context_parallel_degree"] = (SHARED, _states_by_shares)
    if layout.pp > 1:
        tried["pipeline_parallel_degree"] = (PACKED, _states_by_stages)
    for setting, (attention, states) in tried.items():

        def shared(attention: str = attention, states: States = states) -> Result:
            model, layers = specimen_and_layers(model_config, attention, longest, least=RANKS)
            return result_in_rows(model, states(model.to(device), layers, trial.batch), trial)

        own = own_result(model_config, longest, trial, device, least=RANKS)
        reason = reason_against(shared, own)
        if reason is not None:
            raise UserError(
                f"parallelism.{setting}: shared out like that, {kind} would compute something else "
                f"({reason}): use other parallelisms."
            )


def _shares(whole: Tensor) -> Tensor:
    """The shares of all ranks of tensors that are whole along dimension 1, one behind the other."""
    return torch.cat([shard_sequence(whole, 1, RANKS, rank) for rank in range(RANKS)])


def _states_by_shares(model: PreTrainedModel, _: nn.ModuleList, batch: Batch) -> Tensor:
    """Hidden states of whole rows, computed in the shares of two ranks."""
    bounds = (batch.cu_seqlens, batch.max_seqlen, LENGTH)
    told = packing_arguments(PACKED, *bounds, model.device)
    names = ("input_ids", "position_ids")
    arguments = {name: _shares(batch.columns[name].to(model.device)) for name in names}
    states = backbone(model)(**arguments, use_cache=False, **told).last_hidden_state
    return join_sequence(states.chunk(RANKS), 1)


def _states_by_stages(model: PreTrainedModel, layers: nn.ModuleList, batch: Batch) -> Tensor:
    """Hidden states of whole rows, computed by the two stages of a pipeline."""
    half = len(layers) // 2
    ranges = [range(half), range(half, len(layers))]
    first, last = (stage_of(model, layers, ranges, index) for index in range(RANKS))
    inputs = prepare_inputs(batch, PACKED, model.device)
    last.entrance.received = hidden_states(first.module, inputs)
    return hidden_states(last.module, inputs)
