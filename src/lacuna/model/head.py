"""How a Hugging Face causal LM makes logits of hidden states: found out by asking it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.config import logger
from lacuna.model.kind import is_scoring
from lacuna.parallel.backbone import backbone

if TYPE_CHECKING:  # an extension
    from lacuna.model.router import Router


@dataclass(frozen=True)
class Head:
    """How logits are made: chunk by chunk from the head's weight, or by the model itself.

    After the head's matrix product a model may scale the logits and then cap them softly, as
    Gemma-2, Cohere and Granite do: `cap * tanh(scale * logits / cap)`. Where there is a `router`,
    its load-balancing loss is added to the model's loss.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    chunked: bool = True
    compiled: bool = False
    router: "Router | None" = None

    def logits(self, product: Tensor) -> Tensor:
        """The model's logits from the head's product, in float32."""
        logits = product.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits


def relative_difference(left: Tensor, right: Tensor) -> float:
    """The norm of the difference of two tensors, relative to that of the second."""
    difference = (left.float() - right.float()).norm()
    return float(difference / right.float().norm().clamp(min=1e-12))


@torch.no_grad()
def probe_head(model: PreTrainedModel, compiled: bool) -> Head:
    """Finds out how a model makes logits by comparing the chunked path with the model's own logits.

    The chunked path knows what the configuration mentions: Gemma's soft cap, and Cohere's and
    Granite's scales. A few tokens are compared with the head's weight as it is, and once more with
    it enlarged, since near zero a soft cap would not show.
    """
    if is_scoring(model.config):
        from lacuna.model.scores import probe_scores  # an extension

        return probe_scores(model, compiled)
    text_config = model.config.get_text_config()
    linear = model.get_output_embeddings()
    multiplied = getattr(text_config, "logit_scale", None) or 1.0
    divided = getattr(text_config, "logits_scaling", None) or 1.0
    soft_cap = getattr(text_config, "final_logit_softcapping", None)
    head = Head(float(multiplied / divided), soft_cap, compiled=compiled)
    if isinstance(linear, nn.Linear) and all(
        _makes_logits(model, linear, head, factor) for factor in (1, 1024)
    ):
        return head
    logger.info(
        "the head does more than lacuna knows: the loss is made from the model's own logits"
    )
    return Head(chunked=False)


def _makes_logits(model: PreTrainedModel, linear: nn.Linear, head: Head, factor: int) -> bool:
    """Whether `head` makes the model's logits while the weight is `factor` times what it is."""
    ids = torch.arange(16)[None].to(model.device) % model.config.get_text_config().vocab_size
    arguments = {"input_ids": ids, "use_cache": False}
    linear.weight.mul_(factor)
    logits = model(**arguments).logits
    hidden = backbone(model)(**arguments).last_hidden_state
    # Not the layer's own output: an adapter or a hook may have changed that, which the chunked path
    # would miss.
    product = F.linear(hidden.to(linear.weight.dtype), linear.weight, linear.bias)
    linear.weight.div_(factor)
    return relative_difference(head.logits(product), logits) < 1e-4
