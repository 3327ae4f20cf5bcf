"""Activation checkpointing: what the forward pass forgets and the backward pass computes again."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operation
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

import lacuna.parallel.context  # noqa: F401  registers its operation
from lacuna.config import Config

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default}
_KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.lacuna.ring_attention.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


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
    contexts = {"context_fn": lambda: create_selective_checkpoint_contexts(_policy())} if option == "op" else {}
    for layer in layers[every - 1 :: every]:
        layer.forward = _checkpointed(layer.forward, contexts)


def offload_inputs(model: PreTrainedModel, device_type: str) -> None:
    """Makes a decoder, in place, keep the inputs of its layers [B, T, width] in CPU memory until the backward pass.

    The hooks are around the decoder and not its layers, since compiled layers must not contain them.
    """
    base, width = model.base_model, model.config.get_text_config().hidden_size
    forward, stream = base.forward, torch.cuda.Stream() if device_type == "cuda" else None

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if tensor.ndim != 3 or tensor.shape[-1] != width or not tensor.is_floating_point():
            return tensor
        if stream is None:
            return tensor.device, tensor.clone()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory must not be given away before it is copied
        return tensor.device, kept

    def unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return kept[1].to(kept[0], non_blocking=True)

    def offloading(*arguments: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*arguments, **named)

    base.forward = offloading


def _checkpointed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    def repeatable(*arguments: Any, **named: Any) -> Any:  # a `partial` would not compile as one graph
        return checkpoint(forward, *arguments, use_reentrant=False, **contexts, **named)

    return repeatable


def _policy() -> Callable[..., CheckpointPolicy]:
    """Saves attention, communication and every second matrix product, which take longest to compute again.

    The forward pass and its repetition count their products apart.
    """
    keep_product = {repeated: itertools.cycle((True, False)) for repeated in (True, False)}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = operation in _KEPT or (operation in _PRODUCTS and next(keep_product[context.is_recompute]))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
