"""The rows of a vocabulary: in which memory they are, and which of them learn."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.model.architecture import vocabulary_weights
from lacuna.parallel.fsdp import local, own_part


def embeds_on_cpu(model: PreTrainedModel, base: str, alone: bool, device_type: str) -> bool:
    """Whether the embedding stays in CPU memory: on a single GPU, frozen beside quantised weights.

    `base` is `quantization.base`, and `alone` says that nothing is sharded. An embedding that is
    also the head does not stay there.
    """
    if device_type != "cuda" or base == "none" or not alone:
        return False
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        return False
    head = getattr(model.get_output_embeddings(), "weight", None)
    return head is not embedding.weight and not embedding.weight.requires_grad


def look_up_on_cpu(embedding: nn.Module) -> None:
    """Moves an embedding to CPU memory, in place; what is looked up goes to the ids' device."""
    forward = embedding.cpu().forward
    embedding.forward = lambda ids: forward(ids.cpu()).to(ids.device)


def require_gradients_of_embedded(model: PreTrainedModel) -> None:
    """Has gradients flow back to the output of a frozen embedding, in place.

    Else the first layer, whose input would need none, would be compiled anew for every kind of
    batch.
    """

    def require(_: nn.Module, __: tuple[Tensor], found: Tensor) -> Tensor:
        return found.requires_grad_(torch.is_grad_enabled())

    model.get_input_embeddings().register_forward_hook(require)


def freeze_rows(model: PreTrainedModel, trained: Sequence[int]) -> None:
    """Has only the rows of the ids `trained` of a sharded model's vocabulary learn, in place."""
    for weight in vocabulary_weights(model).values():
        if not weight.requires_grad:
            continue
        frozen = torch.ones(len(weight), *[1] * (weight.ndim - 1), dtype=torch.bool)
        frozen[trained] = False
        rows = own_part(frozen, weight).to(weight.device)
        weight.register_post_accumulate_grad_hook(partial(_zero_gradients, rows))


def _zero_gradients(rows: Tensor, weight: Tensor) -> None:
    """Zeroes the gradients of these rows, so that AdamW without decay leaves them as they are."""
    assert weight.grad is not None, "it was accumulated before this is called"
    local(weight.grad).masked_fill_(rows, 0)
