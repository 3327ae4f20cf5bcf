"""Activation checkpointing: what the forward pass forgets and the backward pass computes again."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.parallel.backbone import backbone

# Operations by their names, or how these begin.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm")
_ATTENTION = ("aten::_scaled_dot_product_", "torch_attn::_varlen_attn", "lacuna::ring_attention")
_COMMUNICATION = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
KEPT = (*_ATTENTION, *(f"_c10d_functional::{name}" for name in _COMMUNICATION))


def recompute(layers: Sequence[nn.Module], config: Config) -> None:
    """Makes each layer, as `activation_checkpoint` says, recompute its activations, in place.

    The layer's forward is replaced and not the layer wrapped, so that the names of parameters stay.
    """
    settings = config.activation_checkpoint
    if settings.mode == "memory_budget":
        torch._functorch.config.activation_memory_budget = settings.memory_budget
    if settings.mode not in ("full", "selective"):
        return
    option = settings.selective_ac_option if settings.mode == "selective" else "1"
    every = 1 if option == "op" else int(option)
    contexts = (
        {"context_fn": lambda: create_selective_checkpoint_contexts(_policy())}
        if option == "op"
        else {}
    )
    for layer in layers[every - 1 :: every]:
        layer.forward = _checkpointed(layer.forward, contexts)


def offload_inputs(model: PreTrainedModel, device_type: str) -> None:
    """Makes a decoder, in place, keep the inputs of its layers [B, T, width] in CPU memory until the backward pass.

    The hooks are around the decoder and not its layers, since compiled layers must not contain
    them.
    """
    base, width = backbone(model), model.config.get_text_config().hidden_size
    device = torch.get_device_module(device_type)  # streams of a CPU do nothing
    forward, stream = base.forward, device.Stream()

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if tensor.ndim != 3 or tensor.shape[-1] != width or not tensor.is_floating_point():
            return tensor
        stream.wait_stream(device.current_stream())
        with device.stream(stream):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(
                tensor, non_blocking=True
            )
        if tensor.is_cuda:
            tensor.record_stream(stream)  # its memory must not be given away before it is copied
        return tensor.device, kept

    def unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device.current_stream().wait_stream(stream)
        return kept[1].to(kept[0], non_blocking=True)

    def offloading(*arguments: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*arguments, **named)

    base.forward = offloading


def _checkpointed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    def repeatable(
        *arguments: Any, **named: Any
    ) -> Any:  # a `partial` would not compile as one graph
        return checkpoint(forward, *arguments, use_reentrant=False, **contexts, **named)

    return repeatable


def _policy() -> Callable[..., CheckpointPolicy]:
    """Saves attention, communication and every second matrix product, which take longest to compute again.

    The forward pass and its repetition count their products apart.
    """
    keep_product = {repeated: itertools.cycle((True, False)) for repeated in (True, False)}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = operation.name()
        kept = name.startswith(KEPT) or (
            name in PRODUCTS and next(keep_product[context.is_recompute])
        )
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
