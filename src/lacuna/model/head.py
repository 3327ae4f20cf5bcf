"""From a micro-batch to its loss, for any Hugging Face causal LM: how its head makes logits, found out by asking it."""

import copy
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import logger, refuse
from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.model.inputs import Inputs, packing_arguments
from lacuna.model.loss import Head, chunked_linear_cross_entropy
from lacuna.parallel.pipeline import PassThrough
from lacuna.parallel.tensor import gather_sequence_slices


def hidden_states(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """What the head is given [B, T, width]."""
    return model.base_model(**inputs.arguments).last_hidden_state


def summed_loss(model: PreTrainedModel, head: Head, inputs: Inputs) -> Tensor:
    """The summed cross-entropy (nats, float32) of the labels of `inputs`.

    Where hidden states of the whole sequence are gathered first, every rank takes its share of the same loss. Without
    gradients the result has two elements: the loss, and of how many labels the likeliest token is right.
    """
    states = hidden_states(model, inputs) if head.chunked else type(model).forward(model, **inputs.arguments).logits
    gather = inputs.gather
    if gather is not None:
        states = gather_sequence_slices(states, gather)
    states, labels = states.flatten(0, 1), inputs.labels.flatten()
    if head.chunked:
        loss = model.get_output_embeddings().summed_loss(head, states, labels)
    else:
        loss = (head.loss if torch.is_grad_enabled() else head.tried)(states, labels)
    return loss if gather is None else loss / gather.size()


def _loss_of_head(linear: nn.Linear, head: Head, states: Tensor, labels: Tensor) -> Tensor:
    return chunked_linear_cross_entropy(states, linear.weight, labels, linear.bias, head)


def attach_loss(model: PreTrainedModel) -> None:
    """Gives `model` the method `summed_loss(head, inputs)`, in place.

    Methods of the model and of its head and not functions around them, so that sharding gathers what they need.
    """
    for module, method in ((model, summed_loss), (model.get_output_embeddings(), _loss_of_head)):
        if module is not None:
            module.summed_loss = MethodType(method, module)
            register_fsdp_forward_method(module, "summed_loss")


def known_head(model_config: PretrainedConfig, compiled: bool) -> Head:
    """The head that a configuration speaks of: Gemma's soft cap, Cohere's and Granite's scales."""
    text_config = model_config.get_text_config()
    scale = getattr(text_config, "logit_scale", None) or 1.0
    scale /= getattr(text_config, "logits_scaling", None) or 1.0
    return Head(float(scale), getattr(text_config, "final_logit_softcapping", None), compiled=compiled)


def _relative_difference(left: Tensor, right: Tensor) -> float:
    return ((left.float() - right.float()).norm() / right.float().norm().clamp(min=1e-12)).item()


def specimen(whole: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model in small for the probes: one layer of each kind, few tokens, transformers' own initial weights."""
    small = copy.deepcopy(whole.config)
    text_config = small.get_text_config()
    text_config.vocab_size, text_config.pad_token_id = min(text_config.vocab_size, 64), None
    model = meta_model(small, whole.config._attn_implementation, dtype).eval()
    layers = decoder_layers(model)
    kinds = getattr(text_config, "layer_types", None) or [None] * len(layers)
    kinds = [*zip(map(type, layers), kinds, strict=True)]
    for place, kind in enumerate(kinds):
        if kind in kinds[:place]:
            layers[place] = PassThrough()
    model.to_empty(device=device)
    model.init_weights()
    return model


def _probe_inputs(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    """One row of two documents of 8 tokens."""
    ids = (input_ids % model.config.get_text_config().vocab_size)[None].to(model.device)
    positions = torch.arange(16, device=model.device)[None] % 8
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32)
    told = packing_arguments(model.config._attn_implementation, bounds, 8, 16, model.device)
    return Inputs({"input_ids": ids, "position_ids": positions, "use_cache": False, **told}, ids)


@torch.no_grad()
def probe_head(model: PreTrainedModel, compiled: bool) -> Head:
    """Compares the chunked path with the model's own logits on a few tokens and decides which one to use.

    They are compared as they are, and with the head's weight enlarged: near zero a soft cap would not show.
    """
    head, linear = known_head(model.config, compiled), model.get_output_embeddings()
    inputs, known = _probe_inputs(model, torch.arange(16)), isinstance(linear, nn.Linear)
    for factor in (1, 1024) if known else ():
        linear.weight.mul_(factor)
        logits, hidden = model(**inputs.arguments).logits, hidden_states(model, inputs)
        # Not the layer's own output: an adapter or a hook may have changed that, which the chunked path would miss.
        product = F.linear(hidden, linear.weight, linear.bias)
        linear.weight.div_(factor)
        tolerance = 1e-4 if hidden.dtype == torch.float32 else 3e-2
        known &= _relative_difference(head.logits(product), logits) < tolerance
    if known:
        return head
    logger.info("the head does more than lacuna knows: the loss is made from the model's own logits")
    return Head(chunked=False)


@torch.no_grad()
def probe_packing(model: PreTrainedModel) -> None:
    """Changes one of two documents in a row and asks whether the other's hidden states change.

    Raises `UserError` when they do: the architecture does not keep packed documents apart.
    """
    first = torch.arange(16) + 3
    second = torch.cat([first[:8] + 7, first[8:]])
    states = [hidden_states(model, _probe_inputs(model, ids))[:, 8:] for ids in (first, second)]
    attention = model.config._attn_implementation
    refuse({
        f"data.document_mask: {type(model).__name__} with attention {attention!r} lets packed documents see each other "
        "(it does not follow position ids): set data.document_mask = false to accept that, or choose another "
        "model.attention": _relative_difference(*states) > 1e-3
    })  # fmt: skip
