"""How much memory a rank will need, estimated from shapes alone."""

from itertools import accumulate

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import Config
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model.architecture import decoder_layers
from lacuna.model.loss import CHUNK_BYTES
from lacuna.parallel.fsdp import reshard_after_forward
from lacuna.parallel.mesh import Layout
from lacuna.parallel.schedule import held_stages, pipeline_order
from lacuna.train.batch import BatchPlan


def recomputed_share(settings: ActivationCheckpointConfig) -> float:
    """The share of the layers' activations that the backward pass computes again."""
    option = settings.selective_ac_option
    selective = 0.5 if option == "op" else 1 / int(option)
    shares = {"none": 0.0, "full": 1.0, "selective": selective, "memory_budget": 1 - settings.memory_budget}
    return shares[settings.mode]


def layers_in_flight(config: Config, layout: Layout, microbatches: int, layers: int) -> float:
    """For how many layers a rank holds the activations of a micro-batch: in a pipeline, on the rank with most."""
    if layout.pp == 1:
        return layers
    order = pipeline_order(config.parallelism, microbatches)
    held = {"F": 1, "B": -1, "I": 0, "W": -1}
    most = max(max(accumulate(held[action.kind] for action in actions)) for actions in order.values())
    return most * layers / sum(map(len, held_stages(order).values()))


def _kept_values(text: PretrainedConfig, layers: float, tp: int, fused: bool, recomputed: float) -> float:
    """What `layers` keep for the backward pass, per token: a count of the tensors a decoder layer saves.

    Attention keeps its input, normed input, query, key, value and output; the feed-forward part its input, normed
    input and three (gated) or two wide tensors. Uncompiled code also keeps the intermediate results of norms,
    rotations and activations, about as much again. Of what is recomputed, the layers' inputs and one layer remain.
    Tensor parallelism divides all of it but the normed inputs, which it gathers.
    """
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    key_value = getattr(text, "num_key_value_heads", None) or heads
    wide = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    divided = 2 * hidden + 2 * heads * head_dim + 2 * key_value * head_dim + 3 * wide
    layer = (2 * hidden + divided / tp) * (1 if fused else 2)
    kept = layers * ((1 - recomputed) * layer + recomputed * hidden / tp) + (layer if recomputed else 0)
    return kept + 2 * hidden / tp


def estimate_memory(
    config: Config, layout: Layout, plan: BatchPlan, model: PreTrainedModel, compute: torch.dtype, compiled: bool
) -> dict[str, float]:
    """Bytes by what holds them on the rank that needs most, with an even share of the layers.

    `model` needs no memory itself; the allocator's rounding and the CUDA context (about 1 GiB) come on top. Of a
    pipeline it is taken to have the larger end: the embedding or the head, as large as each other, and the loss. What
    is outside the layers, tensor parallelism only stores in shares.
    """
    text, shards = model.config.get_text_config(), layout.dp_shard * layout.cp
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder_layers(model)]
    head = text.vocab_size * text.hidden_size
    outside = head if layout.pp > 1 else model.num_parameters() - sum(layers)
    inside, layer = sum(layers) / layout.pp / layout.tp, max(layers) / layout.tp
    shard = (outside / layout.tp + inside) / shards
    stored = getattr(torch, config.training.dtype).itemsize
    reduced = getattr(torch, config.training.mixed_precision_reduce).itemsize
    copies = compute.itemsize != stored or shards > 1
    at_once = outside + (2 * layer if reshard_after_forward(config, layout) else inside)
    unreduced = outside + (layer if layout.pp == 1 else inside)  # a pipeline reduces gradients at its end
    tokens = plan.micro_batch * config.training.seq_len / layout.cp
    in_flight = layers_in_flight(config, layout, plan.accumulation, len(layers))
    recomputed = recomputed_share(config.activation_checkpoint)
    kept = _kept_values(text, in_flight, layout.tp, compiled, recomputed)
    return {
        "weights": shard * stored,
        "gradients": shard * stored + unreduced * (compute.itemsize + reduced),
        "optimizer": 2 * shard * stored,
        "gathered": at_once * compute.itemsize if copies else 0,
        "activations": tokens * kept * compute.itemsize,
        "loss": 3 * min(CHUNK_BYTES, 4 * tokens / layout.tp * text.vocab_size) + 4 * head,
    }
