"""Adapters that learn lengths of weights apart from their directions (DoRA, arXiv 2402.09353)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.lora import Lora
from lacuna.model.layers.wrapping import stored_parameter, whole_tensor
from lacuna.parallel.fsdp import local, own_part


class Dora(Lora):
    """A linear layer that computes with its weight changed by an adapter, and rescaled.

    The rows of the changed weight get the lengths that are learned.
    """

    lora_magnitude_vector: Tensor

    def add_parts(self, rank: int, dtype: torch.dtype) -> None:
        """Gives the layer the tensors of its adapter, empty, in place."""
        super().add_parts(rank, dtype)
        self.lora_magnitude_vector = nn.Parameter(self.lora_B.new_empty(len(self.lora_B)))

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output with the changed and rescaled weight."""
        result: Tensor = super(Lora, self).forward(hidden)
        if not self.adapter_scale:
            return result
        shown = F.dropout(hidden, self.adapter_dropout, self.training)
        # Dropout applies to the input of the weight, too; the lengths of the changed rows are
        # constants to the gradients (DoRA, section 4.3).
        unbiased = super(Lora, self).forward(shown) if self.adapter_dropout else result
        if self.bias is not None:
            unbiased = unbiased - self.bias
        with torch.no_grad():
            down, up = self.lora_A.float(), self.lora_B.float()
            lengths = self.row_lengths(self.merged(self.weight.float(), down, up))
        factor = self.lora_magnitude_vector / lengths.to(hidden.dtype)
        return result + (factor - 1) * unbiased + factor * self.adapter_output(shown)

    def row_lengths(self, weight: Tensor) -> Tensor:
        """The length of the row that a weight has for each output [out]."""
        lengths: Tensor = torch.linalg.vector_norm(weight, dim=0 if is_transposed(self) else 1)
        return lengths

    def plain_weight(self, name: str) -> Tensor:
        """The weight with the adapter merged into it, and its rows as long as is learned."""
        whole = super().plain_weight(name)
        if name != "weight":
            return whole
        magnitude = whole_tensor(stored_parameter(self, "lora_magnitude_vector")).float()
        factor = magnitude / self.row_lengths(whole)
        return whole * (factor if is_transposed(self) else factor[:, None])

    def initialize_from_weight(self) -> None:
        """Sets the learned lengths, in place, to those of the weight, which nothing changes yet."""
        # The weight is whole, since torch 2.11 cannot reduce one that is sharded.
        lengths = self.row_lengths(whole_tensor(self.weight).float())
        local(self.lora_magnitude_vector).copy_(own_part(lengths, self.lora_magnitude_vector))
