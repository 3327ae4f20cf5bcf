"""How much memory a run will take on the rank that needs most."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.config.machine import ActivationCheckpointConfig, ParallelismConfig
from lacuna.data import BatchSizes
from lacuna.model.architecture import attention_heads, decoder_layers, head_dim, layer_settings
from lacuna.model.chunks import CHUNK_BYTES
from lacuna.model.layers.quantized import quantized_modules
from lacuna.model.layers.quantized_stacks import quantized_stacks
from lacuna.model.layers.stacks import LoraStacks
from lacuna.model.layers.wrapping import stored_parameter
from lacuna.model.parameter_groups import state_bytes
from lacuna.model.vocabulary import embeddings_on_cpu
from lacuna.parallel.expert_stacks import stacks_of
from lacuna.parallel.fsdp import is_alone, reshard_after_forward
from lacuna.parallel.mesh import Layout
from lacuna.parallel.mixtures import mixtures_in
from lacuna.parallel.parallelize import compile_enabled
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.recompute import halved_every, is_by_operation
from lacuna.parallel.schedule import held_stages, most_unfinished, pipeline_order


def layers_in_flight(settings: ParallelismConfig, pp: int, microbatches: int, layers: int) -> float:
    """How many layers' activations, each of one micro-batch, a rank holds at once.

    In a pipeline over `pp` ranks this is the rank that holds most.
    """
    if pp == 1:
        return layers
    order = pipeline_order(settings, microbatches)
    stages = sum(map(len, held_stages(order).values()))
    return max(map(most_unfinished, order.values())) * layers / stages


def recomputed_share(settings: ActivationCheckpointConfig) -> float:
    """The share of the activations of the layers that is computed anew in the backward pass."""
    if settings.mode == "full":
        return 1
    if settings.mode == "memory_budget":
        return 1 - settings.memory_budget
    if settings.mode == "selective" and not is_by_operation(settings):
        return 1 / int(settings.selective_ac_option)
    return 0


def _kept_values(
    model: PreTrainedModel,
    layers: float,
    tp: int,
    fused: bool,
    settings: ActivationCheckpointConfig,
) -> float:
    """How many values `layers` keep for the backward pass, per token.

    Attention keeps its input, normed input, query, key, value and output, and query and key once
    more where these are normed; the feed-forward part its input, normed input and three (gated) or
    two wide tensors. Uncompiled code also keeps the intermediate results of norms, rotations and
    activations, about as much again. By operation a layer keeps its input, attention's output and
    products (`halved_every`). Of what is recomputed, the layers' inputs and one layer remain, with
    its gradients where nothing else is kept; of inputs in CPU memory two are back. Of wide
    tensors computed in pieces, one piece's remain. Tensor parallelism divides all of it but the
    normed inputs, which it gathers.
    """
    widest = max(layer_settings(model.config.get_text_config()), key=head_dim)
    hidden = widest.hidden_size
    heads = attention_heads(widest)
    key_value = getattr(widest, "num_key_value_heads", None) or heads
    wide = getattr(widest, "intermediate_size", None) or getattr(widest, "n_inner", None)
    wide = wide or 4 * hidden
    turned = (heads + key_value) * head_dim(widest)
    attention = 2 * hidden + 2 * turned
    if any(name.endswith("q_norm") for name, _ in decoder_layers(model)[0].named_modules()):
        attention += turned
    feed_forward = 3.0 * wide
    one_piece = 0.0
    if settings.mlp_chunks > 1:
        one_piece = feed_forward / settings.mlp_chunks / tp
        feed_forward = 0.0
    layer = 2 * hidden + (attention + feed_forward) / tp
    if not fused:
        layer *= 2
        one_piece *= 2
    recomputed = recomputed_share(settings)
    kept = (1 - recomputed) * layer + recomputed * hidden / tp
    if is_by_operation(settings):
        products = turned + key_value * head_dim(widest) + hidden + 2 * wide
        share = 1 - 1 / (2 * halved_every(settings))
        kept = (hidden + heads * head_dim(widest) + products * share) / tp
    # Keys and values of grouped heads are narrower than what is moved.
    narrow = 0.0 if settings.mode == "full" else 2 * key_value * head_dim(widest) / tp
    moved = settings.offload_share * (kept - narrow) if settings.offload else 0.0
    kept = layers * (kept - moved) + min(layers, 2) * moved
    at_once = {"full": 2, "selective": 1, "memory_budget": 1}.get(settings.mode, 0)
    return float(kept + at_once * layer + max(at_once, 1) * one_piece + 2 * hidden / tp)


class _WeightSizes(NamedTuple):
    """How many weights there are to store and compute with on the rank that needs most memory.

    Attributes:
        inside: weights of its layers that it computes with, divided by tensor parallelism.
        layer: weights of its largest layer, divided likewise.
        outside: weights outside the layers, which tensor parallelism does not divide when used.
        shard: all that it stores.
        learning_share: the share of all weights that is trained.
    """

    inside: float
    layer: float
    outside: float
    shard: float
    learning_share: float


def _room_of(layer: nn.Module, room: dict[Any, float]) -> float:
    return sum(room[weight] for weight in layer.parameters())


def _weight_sizes(model: PreTrainedModel, layout: Layout, stored: int) -> _WeightSizes:
    """The weights of a rank, where one that is not quantised takes `stored` bytes.

    A quantised weight counts as many as would take its room. The rank is taken to have the larger
    end of a pipeline, which is the embedding or the head, as large as each other.
    """
    room: dict[Any, float] = {weight: weight.numel() for weight in model.parameters()}
    for layer in quantized_modules(model).values():
        room[layer.weight] = layer.packed_bytes / stored
    for stacks in quantized_stacks(model).values():
        for name in dict(stacks.dense_shapes):
            stack = stored_parameter(stacks, name)
            room[stack] = len(stack) * stacks.packed_bytes(name) / stored
    total = sum(room.values())
    stored_layers = [_room_of(layer, room) for layer in decoder_layers(model)]
    if layout.ep > 1:  # a rank gathers and computes with its own experts only
        for experts in stacks_of(decoder_layers(model)):
            for weight in experts.parameters():
                room[weight] /= layout.ep
    if layout.tp > 1:  # which does not split mixtures: each rank has its experts whole
        for block in decoder_layers(model):
            for mixture in mixtures_in(block, model.config).values():
                for weight in mixture.parameters():
                    room[weight] *= layout.tp
    layers = [_room_of(layer, room) for layer in decoder_layers(model)]
    text = model.config.get_text_config()
    outside = text.vocab_size * text.hidden_size if layout.pp > 1 else total - sum(stored_layers)
    inside = sum(layers) / layout.pp / layout.tp
    shard = (outside + sum(stored_layers) / layout.pp) / layout.tp / (layout.dp_shard * layout.cp)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return _WeightSizes(
        inside=inside,
        layer=max(layers) / layout.tp,
        outside=outside,
        shard=shard,
        learning_share=trained / total,
    )


def _dequantised_values(model: PreTrainedModel, layout: Layout) -> float:
    """How many values of dequantised stacks of experts there are at once: those of one layer.

    Where adapters are added to stacks, these are there three times while that is done to one.
    """
    most = 0.0
    for stacks in quantized_stacks(model).values():
        sizes = [stored_parameter(stacks, name).numel() for name, _ in stacks.dense_shapes]
        again = 2 * max(sizes) if isinstance(stacks, LoraStacks) else 0
        most = max(most, (sum(sizes) + again) / layout.ep)
    return most


def _held_gradients(sizes: _WeightSizes, layout: Layout, early: bool) -> float:
    """How many gradients there are at a time; `early` steps drop those of a layer at once."""
    largest = max(sizes.layer, sizes.outside) / layout.dp_shard / layout.cp
    return min(largest, sizes.shard) if early else sizes.shard


def _unreduced_bytes(
    sizes: _WeightSizes, stages: int, zero_1: bool, gathered: int, reduced: int
) -> float:
    """Bytes of the gradients that wait for being reduced to shards, if all weights learn."""
    # A pipeline reduces its gradients when all of them are there.
    waiting = sizes.outside + (sizes.inside if stages > 1 else sizes.layer)
    found = waiting * (gathered + reduced)
    if zero_1:  # all wait for those of the last micro-batch
        found += (sizes.outside + sizes.inside) * reduced
    return found


def _embedded(model: PreTrainedModel) -> int:
    """How many weights are in embeddings, and in heads tied to them."""
    found = {one.weight for one in model.modules() if isinstance(one, nn.Embedding)}
    return sum(weight.numel() for weight in found)


def _loss_bytes(model: PreTrainedModel, tokens: float) -> float:
    """Bytes of a chunk's logits and their gradients, and of the head's gradient in float32."""
    text = model.config.get_text_config()
    learns: bool = cast(Any, model).get_output_embeddings().weight.requires_grad
    chunk = CHUNK_BYTES if learns else CHUNK_BYTES // 4
    head: float = 4 * text.vocab_size * text.hidden_size
    logits: float = min(chunk, 4 * tokens * text.vocab_size)
    return 3 * logits + head * learns


def estimate_memory(
    config: Config, layout: Layout, batch: BatchSizes, model: PreTrainedModel, device: str
) -> dict[str, float]:
    """Bytes by what holds them on the rank that needs most, with an even share of the layers.

    Not all of it is taken at one time (`peak_memory`). The allocator's rounding, the CUDA context
    (about 1 GiB) and what is in CPU memory are left out. `model` needs no memory itself.
    """
    compute = compute_dtype(config.training, device).itemsize
    compiled = compile_enabled(config.compile, config.parallelism, device)
    master = getattr(torch, config.training.dtype).itemsize
    stored = compute if config.lora.rank else master
    sizes = _weight_sizes(model, layout, stored)
    learns = sizes.learning_share
    reduced = getattr(torch, config.training.mixed_precision_reduce).itemsize
    gathered = compute if config.quantization.base == "none" else master  # for weights that learn
    alone = is_alone(config.training, layout)
    zero_1 = config.parallelism.zero_stage == 1 and batch.accumulation > 1
    unreduced = 0.0 if alone else _unreduced_bytes(sizes, layout.pp, zero_1, gathered, reduced)
    halved = alone and device == "cuda" and config.may_halve_weights
    at_once = 0.0
    differs = compute != stored or layout.dp_shard * layout.cp > 1
    if differs and not (alone and (compiled or halved)):
        resharded = reshard_after_forward(config.parallelism, config.training, layout)
        at_once = sizes.outside + (2 * sizes.layer if resharded else sizes.inside)
    dequantised = _dequantised_values(model, layout) * compute
    tokens = batch.micro_batch * config.training.seq_len / layout.cp
    layers = len(decoder_layers(model))
    in_flight = layers_in_flight(config.parallelism, layout.pp, batch.accumulation, layers)
    kept = _kept_values(model, in_flight, layout.tp, compiled, config.activation_checkpoint)
    weights = sizes.shard * (learns * master + (1 - learns) * stored)
    if embeddings_on_cpu(model, config.quantization.base, alone, device):
        text = model.config.get_text_config()
        weights -= text.vocab_size * text.hidden_size * stored
    held = _held_gradients(sizes, layout, config.optimizer.early_step_in_backward)
    if halved and batch.accumulation == 1:
        held -= (held - _embedded(model)) * (1 - compute / master)
    on_device = device == "cpu" or not config.training.enable_cpu_offload
    state = state_bytes(model, config.optimizer, master) * learns * sizes.shard
    return {
        "weights": weights * on_device,
        "gradients": learns * (held * master * on_device + unreduced),
        "optimizer": state * on_device,
        "gathered": at_once * (learns * gathered + (1 - learns) * compute) + dequantised,
        "activations": tokens * kept * compute,
        "loss": _loss_bytes(model, tokens / layout.tp),
    }


def peak_memory(parts: Mapping[str, float], accumulation: int, moved: float = 0.0) -> float:
    """Bytes of all `parts` that are taken at one time, at most.

    The backward pass frees activations as it makes gradients. So both are whole at one time only
    where gradients of another micro-batch are there already. A share of the optimizer's state is
    `moved`, and not there beside activations.
    """
    gradients = parts["gradients"]
    state = parts.get("optimizer", 0.0)
    passes = parts["activations"] + parts["loss"] + state * (1 - moved)
    if accumulation > 1:
        passes += gradients
    always = sum(parts.values()) - gradients - state - parts["activations"] - parts["loss"]
    return always + max(passes, gradients + state)
