"""The model of a run, in the order of the lines of `build_model`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import distribute_tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.data import Batch
from lacuna.data.tokenizer import added_ids
from lacuna.model import architecture
from lacuna.model.attention import choose_attention
from lacuna.model.head import Head, attach_loss, hidden_states, probe_head, probe_packing, specimen, summed_loss
from lacuna.model.initialize import compute_buffers, initialize_weights
from lacuna.model.inputs import Inputs, prepare_inputs
from lacuna.model.limits import check_layout
from lacuna.model.weights import load_weights
from lacuna.parallel.fsdp import compute_dtype
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.parallel.parallelize import compile_enabled, parallelize
from lacuna.parallel.pipeline import Pipeline, Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltModel:
    """A model ready to train, and what the loop needs to know of it.

    Attributes:
        model: all parameters that this rank has a share of, under their names.
        stages: the parts of it that this rank runs: the model itself, or its stages of a pipeline.
        pipeline: runs the stages, when there are several over all ranks.
    """

    config: Config
    model: PreTrainedModel
    stages: Sequence[Stage]
    pipeline: Pipeline | None
    mesh: Mesh
    device: torch.device
    head: Head
    parameters: int
    matrix_parameters: int

    def inputs(self, batch: Batch) -> Inputs:
        """This rank's share of `batch`, on the device."""
        attention, gather = self.model.config._attn_implementation, self.config.parallelism.disable_loss_parallel
        return prepare_inputs(batch, attention, self.device, self.mesh, gather)


def plan_model(config: Config, tokenizer: PreTrainedTokenizerBase, layout: Layout, device_type: str) -> PreTrainedModel:
    """The run's model without memory, with the attention that it will have.

    Raises `UserError` for a model that cannot be had like that.
    """
    model_config = architecture.load_model_config(config, tokenizer)
    check_layout(config, model_config, layout)
    attention = choose_attention(config, model_config, device_type, compute_dtype(config, device_type), layout)
    return architecture.meta_model(model_config, attention, getattr(torch, config.training.dtype))


def build_model(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    device: torch.device,
    microbatches: int = 1,
    fill: bool = True,
) -> BuiltModel:
    """Builds and spreads the model, and unless its weights will come from a checkpoint, fills it.

    `microbatches` is the number of them in a step, which a pipeline must know. Raises `UserError` for whatever the
    configuration gets wrong.
    """
    model = plan_model(config, tokenizer, mesh.layout, device.type)
    probed = specimen(model, compute_dtype(config, device.type), device)
    head = probe_head(probed, compile_enabled(config, device.type))
    if config.data.document_mask:
        probe_packing(probed)
    del probed
    sizes = {"parameters": model.num_parameters(), "matrix_parameters": architecture.non_embedding_parameters(model)}
    stages = parallelize(model, architecture.decoder_layers(model), mesh, config)
    fill_model(model, config, device, fill)
    for stage in stages:
        attach_loss(stage.module)
    run = partial(_run_stage, head)
    pipeline = Pipeline(config, mesh, device, stages, microbatches, run) if mesh.layout.pp > 1 else None
    if config.model.train_new_tokens_only:
        freeze_rows(model, tokenizer.convert_tokens_to_ids([*config.model.new_tokens]))
    logger.info("attention: %s", model.config._attn_implementation)
    return BuiltModel(config, model, stages, pipeline, mesh, device, head, **sizes)


def freeze_rows(model: PreTrainedModel, trained: Sequence[int]) -> None:
    """Of the vocabulary of a sharded model, lets only the rows of the ids `trained` keep their gradients."""
    for weight in architecture.vocabulary_weights(model).values():
        frozen = torch.ones(len(weight), *[1] * (weight.ndim - 1), dtype=torch.bool)
        frozen[trained] = False
        shard = distribute_tensor(frozen, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.register_post_accumulate_grad_hook(partial(_clear, shard.to_local().to(weight.device)))


def _clear(rows: Tensor, weight: Tensor) -> None:
    weight.grad.to_local().masked_fill_(rows, 0)  # so that AdamW, without decay, leaves them as they are


def _run_stage(head: Head, stage: Stage, inputs: Inputs) -> Tensor:
    """What a pipeline hands on: hidden states, and from the last stage the summed loss."""
    if stage.is_last:
        return summed_loss(stage.module, head, inputs)
    hidden = hidden_states(stage.module, inputs)
    return hidden.clone() if hidden._is_view() else hidden  # zero-bubble schedules detach it in place


def fill_model(model: PreTrainedModel, config: Config, device: torch.device, fill: bool) -> None:
    """Gives a sharded meta model its memory, buffers, and with `fill` weights; offloaded weights stay on the CPU."""
    dtype = getattr(torch, config.training.dtype)
    home = torch.device("cpu") if config.training.enable_cpu_offload else device
    shadow = architecture.meta_model(model.config, model.config._attn_implementation, dtype)
    source = config.model.name_or_path if fill else None
    if source:
        grow = added_ids(config.model) if config.model.new_tokens or config.model.vocabulary_multiple > 1 else None
        load_weights(model, shadow, source, home, dtype, grow)
    else:
        model.to_empty(device=home)
    compute_buffers(model, shadow, device, loaded=bool(source))
    if fill and not source:
        initialize_weights(model, shadow, device, config.training.seed)
