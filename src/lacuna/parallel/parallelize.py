"""The recipe of parallelism: what is done to a model on the meta device, in order."""

import logging
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from lacuna.config.adapters import QuantizationConfig
from lacuna.config.machine import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from lacuna.config.sections import TrainingConfig
from lacuna.parallel.backbone import backbone
from lacuna.parallel.fsdp import is_alone, shard_model
from lacuna.parallel.mesh import Mesh
from lacuna.parallel.recompute import recompute
from lacuna.parallel.schedule import splits_backward
from lacuna.parallel.stages import Stage, keep_own_stages
from lacuna.parallel.tensor import overlap_communication, slice_positions, split_layers

Compiled = Literal["nothing", "feed_forward", "layers"]
"""What of each layer is compiled: of fla's layers their feed-forward blocks, else all."""


def compile_enabled(
    settings: CompileConfig, parallelism: ParallelismConfig, device_type: str
) -> bool:
    """Whether layers are compiled.

    By default they are on GPUs, except in pipelines whose schedule goes backward twice.
    """
    if settings.enable is not None:
        return settings.enable
    return device_type == "cuda" and not splits_backward(parallelism)


def parallelize(
    model: PreTrainedModel,
    layers: nn.ModuleList,
    mesh: Mesh,
    parallelism: ParallelismConfig,
    recomputed: ActivationCheckpointConfig,
    compiled: Compiled,
    training: TrainingConfig,
    quantization: QuantizationConfig,
) -> list[Stage]:
    """Spreads `model` over `mesh`, in place, and returns the parts of it that this rank runs.

    `compiled` says what of the layers is compiled. Raises `UserError` for a model that cannot be
    spread like that.
    """
    stages = keep_own_stages(model, layers, mesh, parallelism)
    own = [layer for stage in stages for layer in stage.layers]
    if mesh.layout.tp > 1:
        slice_positions(model, mesh.tensor)
        split_layers(own, model.config, mesh.tensor)
        if parallelism.enable_async_tensor_parallel:
            overlap_communication(mesh.tensor)
    if mesh.layout.tp * mesh.layout.ep > 1:
        from lacuna.parallel.experts import prepare_mixtures  # an extension

        prepare_mixtures(own, model, mesh, training, quantization, recomputed)
    if compiled != "nothing":
        _compile(stages, mesh, compiled, recomputed)
    recompute(own, recomputed)
    for stage in stages:
        if recomputed.offload:
            from lacuna.parallel.offload import offload_activations  # an extension

            whole = compiled == "layers"
            pipelined = mesh.layout.pp > 1
            kind = mesh.named.device_type
            offload_activations(stage.module, stage.layers, recomputed, whole, pipelined, kind)
        if not is_alone(training, mesh.layout):
            shard_model(
                stage.module,
                stage.layers,
                mesh,
                parallelism,
                training,
                quantization,
            )
    return stages


def _compile(
    stages: list[Stage], mesh: Mesh, compiled: Compiled, recomputed: ActivationCheckpointConfig
) -> None:
    """Has layers be compiled, in place, before they are made to recompute their activations.

    Layers are compiled one by one: one small graph serves them all, and sharding's hooks stay
    outside it. There are more kinds of batches (packed or not, learned from or not, of several
    lengths) than the 8 graphs that torch allows.
    """
    torch._dynamo.config.recompile_limit = 64
    # It warns wherever operations are kept that others may change in place, as none here does.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    layers = [layer for stage in stages for layer in stage.layers]
    if compiled == "feed_forward":
        from lacuna.parallel.feed_forward import compile_feed_forward  # an extension

        compile_feed_forward(layers, recomputed)
        return
    if mesh.layout.tp * mesh.layout.ep > 1:
        from lacuna.parallel.experts import compile_in_parts  # an extension

        layers = compile_in_parts(layers, mesh)
    for layer in layers:
        layer.compile(fullgraph=True)
    for stage in stages:
        if mesh.layout.tp == 1:  # split norms have hooks
            for norm in norms_to_compile(stage.module):
                norm.compile(fullgraph=True)


def norms_to_compile(module: PreTrainedModel) -> list[nn.Module]:
    """The norms beside the layers, as the last one is, that keep less where they are compiled.

    Else their float32 numbers are kept for the backward pass. Those of torch keep none.
    """
    return [
        norm
        for norm in backbone(module).children()
        if type(norm).__name__.endswith("Norm") and not isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    ]
