"""The rows of a vocabulary: in which memory they are, which of them learn, and new ones."""

from collections.abc import Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.model.architecture import vocabulary_weights
from lacuna.parallel.fsdp import local, own_part


def embeddings_on_cpu(model: PreTrainedModel, base: str, alone: bool, device_type: str) -> set[str]:
    """The path of the embedding if it stays in CPU memory.

    It does on a single GPU, frozen beside quantised weights. `base` is `quantization.base`, and
    `alone` says that nothing is sharded. An embedding that is also the head does not stay there.
    """
    embedding = model.get_input_embeddings()
    if device_type != "cuda" or base == "none" or not alone or type(embedding) is not nn.Embedding:
        return set()
    head = getattr(model.get_output_embeddings(), "weight", None)
    if head is embedding.weight or embedding.weight.requires_grad:
        return set()
    return {path for path, module in model.named_modules() if module is embedding}


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


def grow_rows(stored: Any, rows: int, known: int, added: Set[int]) -> Tensor:
    """Reads a weight of a vocabulary and gives it `rows` rows.

    The rows of the ids `added`, and those that the file lacks, are the mean of the first `known`.
    """
    read = stored[...]
    blocks = read[:known].split(4096)  # so that few rows at a time are float64
    mean = sum(block.double().sum(0) for block in blocks) / len(read[:known])
    grown = torch.cat([read, read.new_empty(max(rows - len(read), 0), *read.shape[1:])])
    grown[[*added, *range(len(read), rows)]] = mean.to(read.dtype)
    return grown
