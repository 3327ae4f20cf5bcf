"""How a Hugging Face causal LM makes logits of hidden states: found out by asking it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.config import logger
from lacuna.model.router import Router
from lacuna.parallel.backbone import backbone


@dataclass(frozen=True)
class Head:
    """How logits are made: chunk by chunk from the head's weight, or by the model itself.

    What a model does to the logits after its head's matrix product is to scale, then to cap them
    softly, as Gemma-2, Cohere and Granite do: `cap * tanh(scale * logits / cap)`. With a `router`
    its load-balancing loss is added.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    chunked: bool = True
    compiled: bool = False
    router: Router | None = None

    def logits(self, product: Tensor) -> Tensor:
        """The model's logits from the head's product, in float32."""
        logits = product.float() * self.scale if self.scale != 1.0 else product.float()
        return (
            logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
        )


def relative_difference(left: Tensor, right: Tensor) -> float:
    """The norm of the difference of two tensors, relative to that of the second."""
    return ((left.float() - right.float()).norm() / right.float().norm().clamp(min=1e-12)).item()


@torch.no_grad()
def probe_head(model: PreTrainedModel, compiled: bool) -> Head:
    """Compares the chunked path with the model's own logits on a few tokens and decides which one to use.

    The chunked path knows of what the configuration speaks: Gemma's soft cap, Cohere's and
    Granite's scales. They are compared as they are, and with the head's weight enlarged: near zero
    a soft cap would not show.
    """
    text_config, linear = model.config.get_text_config(), model.get_output_embeddings()
    scale = (getattr(text_config, "logit_scale", None) or 1.0) / (
        getattr(text_config, "logits_scaling", None) or 1.0
    )
    head = Head(
        float(scale), getattr(text_config, "final_logit_softcapping", None), compiled=compiled
    )
    known = isinstance(linear, nn.Linear)
    ids = torch.arange(16)[None].to(model.device) % text_config.vocab_size
    arguments = {"input_ids": ids, "use_cache": False}
    for factor in (1, 1024) if known else ():
        linear.weight.mul_(factor)
        logits = model(**arguments).logits
        hidden = backbone(model)(**arguments).last_hidden_state
        # Not the layer's own output: an adapter or a hook may have changed that, which the chunked
        # path would miss.
        product = F.linear(hidden.to(linear.weight.dtype), linear.weight, linear.bias)
        linear.weight.div_(factor)
        known &= relative_difference(head.logits(product), logits) < 1e-4
    if known:
        return head
    logger.info(
        "the head does more than lacuna knows: the loss is made from the model's own logits"
    )
    return Head(chunked=False)
