"""Adapters that learn the lengths of weights apart from their directions (DoRA, arXiv 2402.09353)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.lora import Lora
from lacuna.model.layers.wrapping import whole_tensor
from lacuna.parallel.fsdp import local, own_part


class Dora(Lora):
    """A linear layer whose output is what its weight, changed by an adapter, makes of the input.

    The weight's rows then get the lengths that are learnt.
    """

    lora_magnitude_vector: Tensor

    def add_parts(self, rank: int, dtype: torch.dtype) -> None:
        """Gives the layer the tensors of its adapter, empty, in place."""
        super().add_parts(rank, dtype)
        self.lora_magnitude_vector = nn.Parameter(self.lora_B.new_empty(len(self.lora_B)))

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output with the changed weight."""
        result = super(Lora, self).forward(hidden)
        if not self.adapter_is_on:
            return result
        shown = F.dropout(hidden, self.adapter_dropout, self.training)
        # The weight itself, too, sees only what is shown; the lengths of rows are constants (DoRA,
        # section 4.3).
        unbiased = super(Lora, self).forward(shown) if self.adapter_dropout else result
        if self.bias is not None:
            unbiased = unbiased - self.bias
        with torch.no_grad():
            factors = (self.weight.float(), self.lora_A.float(), self.lora_B.float())
            lengths = self.row_lengths(self.changed(*factors))
        factor = self.lora_magnitude_vector / lengths.to(hidden.dtype)
        return result + (factor - 1) * unbiased + factor * self.change(shown)

    def row_lengths(self, weight: Tensor) -> Tensor:
        """The lengths of what a weight has for each output [out]."""
        return torch.linalg.vector_norm(weight, dim=0 if is_transposed(self) else 1)

    def plain_weight(self, name: str) -> Tensor:
        """The weight with the adapter in it, its rows as long as is learnt."""
        whole = super().plain_weight(name)
        if name != "weight":
            return whole
        magnitude = whole_tensor(self._parameters["lora_magnitude_vector"]).float()
        factor = magnitude / self.row_lengths(whole)
        return whole * (factor if is_transposed(self) else factor[:, None])

    def measure(self) -> None:
        """Has the lengths begin as those of the weight alone, which nothing changes yet, in place."""
        # Whole, since torch 2.11 cannot add to it as it is sharded.
        lengths = self.row_lengths(whole_tensor(self.weight).float())
        local(self.lora_magnitude_vector).copy_(own_part(lengths, self.lora_magnitude_vector))
