"""Linear layers with frozen, quantised weights, for adapters to learn beside (arXiv 2305.14314).

As a parameter the bytes of a packed weight pass for float32: torch 2.11 shards no integers, and
when FSDP gathers those of 16 bits, what would not be a number becomes another one that is not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lacuna.model.layers.bits import dequantize, packed_sizes, quantize
from lacuna.model.layers.linear import plain_linears
from lacuna.model.layers.wrapping import Place, Wrapper, wrap


@torch.library.custom_op("lacuna::quantized_product", mutates_args=())
def quantized_product(
    hidden: Tensor,
    packed: Tensor,
    down: Tensor | None,
    up: Tensor | None,
    form: str,
    shape: Sequence[int],
    transposed: bool,
    scale: float,
) -> Tensor:
    """`hidden` [..., k] times the weight that is packed in a form, or times its transpose [k, n].

    `shape` is the weight's. With an adapter, `down` [rank, k] and `up` [n, rank], `scale` times
    their product is added to the weight. All is one operation in both passes: no compiler finds a dequantised weight to keep
    between them, and what the adapter makes is added where the product is, not beside it.
    """
    weight = dequantize(packed, form, shape, hidden.dtype)
    result = hidden @ (weight.t() if transposed else weight)
    if down is not None:
        result.flatten(0, -2).addmm_(hidden.flatten(0, -2) @ down.t(), up.t(), alpha=scale)
    return result


@quantized_product.register_fake
def _(hidden: Tensor, *others: Any) -> Tensor:
    *_, shape, transposed, _ = others
    return hidden.new_empty(*hidden.shape[:-1], shape[0 if transposed else 1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, packed, *adapter = inputs[:4]
    ctx.save_for_backward(packed, *([] if adapter[0] is None else [hidden, *adapter]))
    ctx.how = inputs[4:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, *adapted = ctx.saved_tensors
    form, shape, transposed, scale = ctx.how
    turned: tuple[Tensor | None, ...] = (None, None)
    changes: tuple[Tensor | None, ...] = (None, None)
    inward = None
    if adapted:
        hidden, down, up = adapted
        turned = (up.t(), down.t())
        seen = hidden.flatten(0, -2)
        wanted = gradient.flatten(0, -2)
        of_down = (scale * (wanted @ up)).t() @ seen
        of_up = wanted.t() @ (scale * (seen @ down.t()))
        changes = (of_down, of_up)
    if ctx.needs_input_grad[0]:
        inward = quantized_product(gradient, packed, *turned, form, shape, not transposed, scale)
    return inward, None, *changes, None, None, None, None


quantized_product.register_autograd(_backward, setup_context=_keep)


class Quantized(Wrapper):
    """A linear layer whose weight is quantised.

    It is packed, or quantised each time that it is used, as files have it.

    Attributes:
        form: how, nf4 or int8.
        dense_shape: the weight's shape when it is not packed.
    """

    place = Place.PRODUCT
    takes_adapter = True
    form: str
    dense_shape: tuple[int, int]

    @property
    def is_packed(self) -> bool:
        """Whether the weight is stored as bytes that are no numbers."""
        return self._parameters["weight"].ndim == 1

    @property
    def packed_bytes(self) -> int:
        """How many bytes the weight takes when it is packed."""
        return sum(packed_sizes(self.form, self.dense_shape))

    def forward(
        self,
        hidden: Tensor,
        down: Tensor | None = None,
        up: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """The layer's output, with an adapter's if one is given."""
        packed = self.weight if self.weight.ndim == 1 else quantize(self.weight, self.form)
        turned = not isinstance(self, Conv1D)
        how = (self.form, self.dense_shape, turned, scale)
        result = quantized_product(hidden, packed, down, up, *how)
        return result if self.bias is None else result + self.bias

    def dense_weight(self, weight: Tensor) -> Tensor:
        """What the layer would compute with if its stored weight were this one: whole, float32."""
        packed = weight if weight.ndim == 1 else quantize(weight, self.form)
        return dequantize(packed, self.form, self.dense_shape, torch.float32)

    def stored_weight(self, name: str, weight: Tensor) -> Tensor:
        """The weight packed, where that is how it is stored."""
        if name != "weight" or not self.is_packed:
            return weight
        return quantize(weight, self.form).view(torch.float32)

    def plain_weight(self, name: str) -> Tensor:
        """The weight dequantised."""
        whole = super().plain_weight(name)
        return self.dense_weight(whole) if name == "weight" else whole


def quantize_layers(model: PreTrainedModel, form: str, left: Sequence[str]) -> None:
    """Has the linear layers of a whole model compute with quantised weights, in place.

    The head, and modules of which the name or its end is one of those `left`, stay as they are.
    """
    for name, layer in plain_linears(model).items():
        is_left = any(f".{name}.".endswith(f".{part}.") for part in left)
        if layer is not model.get_output_embeddings() and not is_left:
            wrap(layer, Quantized, form=form, dense_shape=tuple(layer.weight.shape))


def quantized_modules(model: nn.Module) -> dict[str, Quantized]:
    """The layers whose weights are quantised, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Quantized)}


def pack_layers(model: nn.Module) -> None:
    """Puts packed weights in the place of quantised ones of a model on the meta device, in place."""
    for layer in quantized_modules(model).values():
        packed = layer.weight.new_empty(layer.packed_bytes // 4, dtype=torch.float32)
        layer.weight = nn.Parameter(packed, requires_grad=False)
