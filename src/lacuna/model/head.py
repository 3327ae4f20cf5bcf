"""From token ids to the loss of any Hugging Face causal LM: how its head makes logits, found out by asking it."""

import logging
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError
from lacuna.model.attention import VARLEN
from lacuna.model.loss import IGNORED, HeadTransform, chunked_linear_cross_entropy

logger = logging.getLogger(__name__)


def packing_arguments(attention: str, cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """What `attention` must be told of the documents in a batch, beside their position ids."""
    if attention != VARLEN and not attention.startswith("flash_attention"):
        return {}  # transformers builds the mask from position ids that start again
    return {
        "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_seqlen, "max_length_k": max_seqlen,
    }  # fmt: skip


def _hidden_states(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, extra: dict[str, Any]) -> Tensor:
    """What the head is given [B, T, width]. No mask and no cache: either would let documents see each other."""
    output = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)
    return output.last_hidden_state


@dataclass(frozen=True)
class Head:
    """How the loss is made: chunk by chunk from the head's weight, or from the model's own logits."""

    transform: HeadTransform
    chunked: bool
    compiled: bool


def _summed_loss(
    model: PreTrainedModel, head: Head, input_ids: Tensor, position_ids: Tensor, labels: Tensor, extra: dict[str, Any]
) -> Tensor:
    labels = labels.flatten()
    if not head.chunked:
        logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    hidden = _hidden_states(model, input_ids, position_ids, extra).flatten(0, 1)
    linear = model.get_output_embeddings()
    return chunked_linear_cross_entropy(
        hidden, linear.weight, labels, linear.bias, head.transform, compiled=head.compiled and hidden.is_cuda
    )


def attach_loss(model: PreTrainedModel) -> None:
    """Gives `model` the method `summed_loss(head, input_ids, position_ids, labels, extra)`, in place.

    A method of the model and not a function around it, so that sharding gathers the parameters of embedding and
    head for the whole of it.
    """
    model.summed_loss = MethodType(_summed_loss, model)
    model.hidden_states = MethodType(_hidden_states, model)
    register_fsdp_forward_method(model, "summed_loss")
    register_fsdp_forward_method(model, "hidden_states")


def head_transform(model_config: PretrainedConfig) -> HeadTransform:
    """The transform that a configuration speaks of: Gemma's soft cap, Cohere's and Granite's scales."""
    text_config = model_config.get_text_config()
    scale = getattr(text_config, "logit_scale", None) or 1.0
    scale /= getattr(text_config, "logits_scaling", None) or 1.0
    return HeadTransform(float(scale), getattr(text_config, "final_logit_softcapping", None))


def _relative_difference(left: Tensor, right: Tensor) -> float:
    left, right = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in (left, right))
    return ((left.float() - right.float()).norm() / right.float().norm().clamp(min=1e-12)).item()


def probe_head(model: PreTrainedModel, compiled: bool) -> Head:
    """Compares the chunked path with the model's own logits on a few tokens and decides which one to use.

    The head's input is enlarged for the comparison: near zero a soft cap would not show.
    """
    transform = head_transform(model.config)
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        logger.info("the head is no linear layer: the loss is made from the model's own logits")
        return Head(transform, False, compiled)
    device = next(model.buffers(), next(model.parameters())).device
    input_ids = torch.arange(8, device=device)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(8, device=device)[None]
    seen: dict[str, Tensor] = {}

    def enlarge(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen["hidden"] = arguments[0]
        return (arguments[0] * 1024,)

    def multiply(module: nn.Linear, arguments: tuple[Tensor, ...], _: Tensor) -> None:
        # Not the layer's own output: an adapter or a hook may have changed that, which the chunked path would miss.
        seen["product"] = F.linear(arguments[0], module.weight, module.bias)

    hooks = [
        linear.register_forward_pre_hook(enlarge),
        linear.register_forward_hook(multiply),
    ]
    extra = packing_arguments(model.config._attn_implementation, torch.tensor([0, 8], device=device).int(), 8)
    try:
        logits = model(input_ids=input_ids, position_ids=positions, use_cache=False, **extra).logits
    finally:
        for hook in hooks:
            hook.remove()
    hidden = model.hidden_states(input_ids, positions, extra)
    tolerance = 1e-4 if hidden.dtype == torch.float32 else 3e-2
    same_input = seen["hidden"].shape == hidden.shape and _relative_difference(hidden, seen["hidden"]) < tolerance
    same_output = _relative_difference(transform.apply(seen["product"]), logits) < tolerance
    if not (same_input and same_output):
        logger.info("the head does more than lacuna knows: the loss is made from the model's own logits")
    return Head(transform, same_input and same_output, compiled)


def probe_packing(model: PreTrainedModel, attention: str) -> None:
    """Changes one of two documents in a row and asks whether the other's hidden states change.

    Raises `UserError` when they do: the architecture does not keep packed documents apart.
    """
    device = next(model.buffers(), next(model.parameters())).device
    positions = torch.cat([torch.arange(8), torch.arange(8)])[None].to(device)
    first = torch.arange(16, device=device)[None] + 3
    second = first.clone()
    second[:, :8] += 7
    vocabulary = model.config.get_text_config().vocab_size
    extra = packing_arguments(attention, torch.tensor([0, 8, 16], device=device).int(), 8)
    states = [model.hidden_states(ids % vocabulary, positions, extra)[:, 8:] for ids in (first, second)]
    if _relative_difference(states[0], states[1]) > 1e-3:
        raise UserError(
            f"data.document_mask: {type(model).__name__} with attention {attention!r} lets packed documents see each "
            f"other (it does not follow position ids): set data.document_mask = false to accept that, or choose "
            f"another model.attention."
        )
