"""The model of a run, in the order of the lines of `build_model`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.model.architecture import (
    AttentionShape,
    attention_shapes,
    decoder_layers,
    load_model_config,
    non_embedding_parameters,
)
from lacuna.model.attention import choose_attention
from lacuna.model.head import Head, attach_loss, probe_head, probe_packing
from lacuna.model.initialize import compute_buffers, initialize_weights
from lacuna.model.weights import load_weights, weight_folder
from lacuna.parallel.fsdp import compute_dtype, inference
from lacuna.parallel.parallelize import compile_enabled, parallelize

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltModel:
    """A model ready to train, and what the loop needs to know of it."""

    model: PreTrainedModel
    layers: Sequence[nn.Module]
    head: Head
    attention: str
    parameters: int
    matrix_parameters: int
    attention_shapes: list[AttentionShape]


def meta_model(model_config: PretrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory: shapes only."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=attention)
    return model.train()


def build_model(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    mesh: DeviceMesh,
    device: torch.device,
    restore: Callable[[PreTrainedModel], None] | None = None,
) -> BuiltModel:
    """Builds, spreads and fills the model; `restore` fills its weights in place instead, from a checkpoint.

    Raises `UserError` for whatever the configuration gets wrong.
    """
    model_config = load_model_config(config, tokenizer)
    dtype = getattr(torch, config.training.dtype)
    attention = choose_attention(config, model_config, device.type, compute_dtype(config, device.type))
    model = meta_model(model_config, attention, dtype)
    layers = decoder_layers(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    matrix_parameters = non_embedding_parameters(model)
    parallelize(model, layers, mesh, config)
    fill_model(model, config, device, restore)
    attach_loss(model)
    compiled = compile_enabled(config, device.type)
    # Dropout would hide what the probes look for, and their tiny shapes must not be compiled for.
    with inference(model), torch.compiler.set_stance("force_eager"):
        head = probe_head(model, compiled)
        if config.data.document_mask:
            probe_packing(model, attention)
    logger.info("attention: %s; loss: %s", attention, "chunked" if head.chunked else "full logits")
    return BuiltModel(model, layers, head, attention, parameters, matrix_parameters, attention_shapes(model_config))


def fill_model(
    model: PreTrainedModel, config: Config, device: torch.device, restore: Callable[[PreTrainedModel], None] | None
) -> None:
    """Gives a sharded meta model its memory, weights and buffers, in place."""
    dtype = getattr(torch, config.training.dtype)
    shadow = meta_model(model.config, model.config._attn_implementation, dtype)
    loaded: set[str] = set()
    if restore is not None:
        model.to_empty(device=device)
        compute_buffers(model, shadow, device)
        restore(model)
        return
    if config.model.name_or_path:
        folder = weight_folder(config.model.name_or_path)
        loaded = load_weights(model, shadow, folder, device, dtype)
    else:
        model.to_empty(device=device)
        initialize_weights(model, shadow, device, config.training.seed)
    compute_buffers(model, shadow, device, loaded)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"still without memory: {left}"
