"""How much memory a run will take on the rank that needs most."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import Config
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.data import BatchPlan
from lacuna.model.architecture import attention_heads, decoder_layers, head_dim, layer_settings
from lacuna.model.build import embeds_on_cpu
from lacuna.model.loss import CHUNK_BYTES
from lacuna.model.quantization import packed_sizes, quantized_modules
from lacuna.parallel.fsdp import is_alone, reshard_after_forward
from lacuna.parallel.mesh import Layout
from lacuna.parallel.parallelize import compile_enabled
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.schedule import held_stages, most_unfinished, pipeline_order


def layers_in_flight(config: Config, layout: Layout, microbatches: int, layers: int) -> float:
    """For how many layers a rank holds the activations of a micro-batch.

    In a pipeline that is the rank with most.
    """
    if layout.pp == 1:
        return layers
    order = pipeline_order(config.parallelism, microbatches)
    stages = sum(map(len, held_stages(order).values()))
    return max(map(most_unfinished, order.values())) * layers / stages


def recomputed_share(settings: ActivationCheckpointConfig) -> float:
    """The share of the activations of the layers that is computed anew in the backward pass."""
    if settings.mode == "full":
        return 1
    if settings.mode == "memory_budget":
        return 1 - settings.memory_budget
    if settings.mode == "selective":
        option = settings.selective_ac_option
        return 0.5 if option == "op" else 1 / int(option)
    return 0


def _kept_values(
    text: PretrainedConfig, layers: float, tp: int, fused: bool, recomputed: float
) -> float:
    """What `layers` keep for the backward pass, per token: how many values.

    Attention keeps its input, normed input, query, key, value and output; the feed-forward part its
    input, normed input and three (gated) or two wide tensors. Uncompiled code also keeps the
    intermediate results of norms, rotations and activations, about as much again. Of what is
    recomputed, the layers' inputs and one layer remain. Tensor parallelism divides all of it but
    the normed inputs, which it gathers.
    """
    hidden, heads = text.hidden_size, attention_heads(text)
    key_value = getattr(text, "num_key_value_heads", None) or heads
    wide = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    divided = 2 * hidden + 2 * (heads + key_value) * head_dim(text) + 3 * wide
    layer = (2 * hidden + divided / tp) * (1 if fused else 2)
    kept = layers * ((1 - recomputed) * layer + recomputed * hidden / tp)
    if recomputed:
        kept += layer
    return float(kept + 2 * hidden / tp)


def estimate_memory(
    config: Config, layout: Layout, batch: BatchPlan, model: PreTrainedModel, device: str
) -> dict[str, float]:
    """Bytes by what holds them on the rank that needs most, with an even share of the layers.

    `model` needs no memory itself; the allocator's rounding and the CUDA context (about 1 GiB) come
    on top. Of a pipeline it is taken to have the larger end: the embedding or the head, as large as
    each other, and the loss. What is outside the layers, tensor parallelism only stores in shares.
    A quantised weight counts as so many that are not as it takes the room of.
    """
    text = model.config.get_text_config()
    shards = layout.dp_shard * layout.cp
    compute = compute_dtype(config, device)
    compiled = compile_enabled(config, device)
    master = getattr(torch, config.training.dtype).itemsize
    stored = compute.itemsize if config.lora.rank else master
    quantised = quantized_modules(model).values()
    room: dict[Any, float] = {weight: weight.numel() for weight in model.parameters()}
    for module in quantised:
        kind: Any = type(module)
        room[module.weight] = sum(packed_sizes(*kind.quantized)) / stored
    layers = [sum(room[weight] for weight in layer.parameters()) for layer in decoder_layers(model)]
    total = sum(room.values())
    head = text.vocab_size * text.hidden_size
    outside = head if layout.pp > 1 else total - sum(layers)
    inside, layer = sum(layers) / layout.pp / layout.tp, max(layers) / layout.tp
    shard = (outside / layout.tp + inside) / shards
    # All of it but where adapters are.
    learns = sum(weight.numel() for weight in model.parameters() if weight.requires_grad) / total
    reduced = getattr(torch, config.training.mixed_precision_reduce).itemsize
    gathered = compute.itemsize if config.quantization.base == "none" else master  # of what learns
    alone = is_alone(config, layout)
    copies = not (alone and compiled) and (compute.itemsize != stored or shards > 1)
    at_once = outside + (2 * layer if reshard_after_forward(config, layout) else inside)
    unreduced = (
        0 if alone else outside + (inside if layout.pp > 1 else layer)
    )  # a pipeline reduces at its end
    learning_head = model.get_output_embeddings().weight.requires_grad
    tokens = batch.micro_batch * config.training.seq_len / layout.cp
    in_flight = layers_in_flight(config, layout, batch.accumulation, len(layers))
    elsewhere = head * stored * embeds_on_cpu(config, layout, model, device)
    recomputed = recomputed_share(config.activation_checkpoint)
    widest = max(layer_settings(text), key=head_dim)
    kept = _kept_values(widest, in_flight, layout.tp, compiled, recomputed)
    return {
        "weights": shard * (learns * master + (1 - learns) * stored) - elsewhere,
        "gradients": learns * (shard * master + unreduced * (gathered + reduced)),
        "optimizer": 2 * learns * shard * master,
        "gathered": at_once * (learns * gathered + (1 - learns) * compute.itemsize)
        if copies
        else 0,
        "activations": tokens * kept * compute.itemsize,
        "loss": 3 * min(CHUNK_BYTES, 4 * tokens / layout.tp * text.vocab_size)
        + 4 * head * learning_head,
    }
