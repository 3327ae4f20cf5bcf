"""How much memory a rank will need, estimated from shapes alone."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from lacuna.config import Config
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model.loss import CHUNK_BYTES


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by what holds them."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        """All of it; the allocator's rounding and the CUDA context (about 1 GiB) come on top."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.loss


def recomputed_share(settings: ActivationCheckpointConfig) -> float:
    """The share of the layers' activations that the backward pass computes again."""
    option = settings.selective_ac_option
    selective = 0.5 if option == "op" else 1 / int(option)
    return {"none": 0.0, "full": 1.0, "selective": selective, "memory_budget": 1 - settings.memory_budget}[
        settings.mode
    ]


def _activation_bytes_per_token(model_config: PretrainedConfig, width: int, fused: bool, recomputed: float) -> int:
    """What the layers keep for the backward pass, per token: a count of the tensors a decoder layer saves.

    Attention keeps its input, normed input, query, key, value and output; the feed-forward part its input, normed
    input and three (gated) or two wide tensors. Uncompiled code also keeps the intermediate results of norms,
    rotations and activations, about as much again. Of what is recomputed, the layers' inputs and one layer remain.
    """
    text = model_config.get_text_config()
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    key_value = getattr(text, "num_key_value_heads", None) or heads
    wide = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    attention = 2 * hidden + 2 * heads * head_dim + 2 * key_value * head_dim
    feed_forward = 2 * hidden + 3 * wide
    layer = (attention + feed_forward) * (1 if fused else 2)
    kept = text.num_hidden_layers * ((1 - recomputed) * layer + recomputed * hidden) + (layer if recomputed else 0)
    return int((kept + 2 * hidden) * width)


def estimate_memory(
    config: Config,
    model_config: PretrainedConfig,
    parameters: int,
    root_parameters: int,
    largest_layer: int,
    dp_shard: int,
    compute: torch.dtype,
    compiled: bool,
    reshard: bool,
) -> MemoryEstimate:
    """The estimate for one rank: `parameters` in all, `root_parameters` outside the layers, `largest_layer` in one.

    `reshard` says whether layers give gathered weights back after the forward pass.
    """
    stored = getattr(torch, config.training.dtype).itemsize
    shard = -(-parameters // dp_shard)
    reduced = getattr(torch, config.training.mixed_precision_reduce).itemsize
    copies = compute.itemsize != stored or dp_shard > 1
    at_once = root_parameters + 2 * largest_layer if reshard and dp_shard > 1 else parameters
    tokens = config.training.batch_size * config.training.seq_len
    vocabulary = model_config.get_text_config().vocab_size
    head = vocabulary * model_config.get_text_config().hidden_size
    chunk = min(CHUNK_BYTES, 4 * tokens * vocabulary)
    return MemoryEstimate(
        weights=shard * stored,
        gradients=shard * stored + (root_parameters + largest_layer) * (compute.itemsize + reduced),
        optimizer=2 * shard * stored,
        gathered=at_once * compute.itemsize if copies else 0,
        activations=tokens
        * _activation_bytes_per_token(
            model_config, compute.itemsize, compiled, recomputed_share(config.activation_checkpoint)
        ),
        loss=3 * chunk + 4 * head,
    )
