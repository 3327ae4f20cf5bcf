"""What is done to the rows of a vocabulary: where they are kept, and which of them learn."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.model.architecture import vocabulary_weights
from lacuna.parallel.fsdp import local, own_part


def embeds_on_cpu(model: PreTrainedModel, base: str, alone: bool, device_type: str) -> bool:
    """Whether the embedding stays in CPU memory: on one GPU, frozen beside quantised weights.

    `base` is `quantization.base`; the embedding must not also be the head.
    """
    if device_type != "cuda" or base == "none" or not alone:
        return False
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        return False
    head = getattr(model.get_output_embeddings(), "weight", None)
    return head is not embedding.weight and not embedding.weight.requires_grad


def look_up_on_cpu(embedding: nn.Module) -> None:
    """Moves an embedding to CPU memory, in place: what it finds there goes to where the ids are."""
    forward = embedding.cpu().forward
    embedding.forward = lambda ids: forward(ids.cpu()).to(ids.device)


def require_gradients_of_embedded(model: PreTrainedModel) -> None:
    """Has gradients go back to what a frozen embedding gives the first layer.

    Otherwise that layer, into which none would go, would be compiled anew for every kind of batch.
    """

    def require(_: nn.Module, __: tuple[Tensor], found: Tensor) -> Tensor:
        return found.requires_grad_(torch.is_grad_enabled())

    model.get_input_embeddings().register_forward_hook(require)


def freeze_rows(model: PreTrainedModel, trained: Sequence[int]) -> None:
    """Of a sharded model's vocabulary, lets only the rows of the ids `trained` keep gradients."""
    for weight in vocabulary_weights(model).values():
        if not weight.requires_grad:
            continue
        frozen = torch.ones(len(weight), *[1] * (weight.ndim - 1), dtype=torch.bool)
        frozen[trained] = False
        rows = own_part(frozen, weight).to(weight.device)
        weight.register_post_accumulate_grad_hook(partial(_clear, rows))


def _clear(rows: Tensor, weight: Tensor) -> None:
    """Clears the gradients of these rows, so that AdamW, without decay, leaves them as they are."""
    local(weight.grad).masked_fill_(rows, 0)
