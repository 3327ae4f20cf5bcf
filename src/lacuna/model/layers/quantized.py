"""Linear layers with frozen, quantised weights, for adapters to learn beside (arXiv 2305.14314).

The bytes of a packed weight are stored as a float32 parameter, because torch 2.11 shards no
integers, and because gathering 16-bit floats would turn one pattern of NaN into another.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lacuna.config import UserError, logger
from lacuna.config.machine import ParallelismConfig
from lacuna.model.layers.bits import dequantize, packed_sizes, quantize
from lacuna.model.layers.linear import plain_linears
from lacuna.model.layers.quantized_stacks import (
    matrices_left,
    quantize_stacks,
    quantized_stacks,
    stacks_in,
)
from lacuna.model.layers.wrapping import Place, Wrapper, stored_parameter, wrap
from lacuna.parallel.schedule import splits_backward


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
    """Multiplies `hidden` [..., k] with a packed weight [k, n], or with its transpose.

    The weight is packed in `form`, and `shape` is its shape before that. With an adapter, which is
    `down` [rank, k] and `up` [n, rank], `scale` times their product is added to the weight. All of
    it is one operation in both passes, so that no compiler finds a dequantised weight to keep
    between them, and so that the adapter's output is added to the product in place.
    """
    weight = dequantize(packed, form, shape, hidden.dtype)
    result = hidden @ (weight.t() if transposed else weight)
    if down is not None and up is not None:
        result.flatten(0, -2).addmm_(hidden.flatten(0, -2) @ down.t(), up.t(), alpha=scale)
    return result


@quantized_product.register_fake
def _(hidden: Tensor, *others: Any) -> Tensor:
    *_, shape, transposed, _ = others
    return hidden.new_empty(*hidden.shape[:-1], shape[0 if transposed else 1])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, packed, down, up = inputs[:4]
    if down is None:
        ctx.save_for_backward(packed)
    else:
        ctx.save_for_backward(packed, hidden, down, up)
    ctx.how = inputs[4:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, *adapted = ctx.saved_tensors
    form, shape, transposed, scale = ctx.how
    up_transposed = None
    down_transposed = None
    of_hidden = None
    of_down = None
    of_up = None
    if adapted:
        hidden, down, up = adapted
        up_transposed = up.t()
        down_transposed = down.t()
        inputs = hidden.flatten(0, -2)
        outputs = gradient.flatten(0, -2)
        of_down = (scale * (outputs @ up)).t() @ inputs
        of_up = outputs.t() @ (scale * (inputs @ down_transposed))
    if ctx.needs_input_grad[0]:
        of_hidden = quantized_product(
            gradient, packed, up_transposed, down_transposed, form, shape, not transposed, scale
        )
    return of_hidden, None, of_down, of_up, None, None, None, None


quantized_product.register_autograd(_backward, setup_context=_save_for_backward)


class Quantized(Wrapper):
    """A linear layer whose weight is quantised.

    The weight is stored packed; or it is stored as files have it, and quantised whenever it is
    used.

    Attributes:
        form: how the weight is quantised: nf4 or int8.
        dense_shape: the weight's shape when it is not packed.
    """

    place = Place.PRODUCT
    takes_adapter = True
    form: str
    dense_shape: tuple[int, int]
    weight: Tensor
    bias: Tensor | None

    @property
    def packed_names(self) -> tuple[str, ...]:
        """The weight's name if it is stored as bytes that are no numbers."""
        return ("weight",) if stored_parameter(self, "weight").ndim == 1 else ()

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
        """The layer's output, with an adapter's output added if an adapter is given."""
        packed = self.weight if self.weight.ndim == 1 else quantize(self.weight, self.form)
        turned = not isinstance(self, Conv1D)
        result: Tensor = quantized_product(
            hidden, packed, down, up, self.form, self.dense_shape, turned, scale
        )
        return result if self.bias is None else result + self.bias

    def dense_weight(self, weight: Tensor) -> Tensor:
        """The weight that the layer would compute with if it stored this one: whole, float32."""
        packed = weight if weight.ndim == 1 else quantize(weight, self.form)
        return dequantize(packed, self.form, self.dense_shape, torch.float32)

    def stored_weight(self, name: str, weight: Tensor) -> Tensor:
        """The weight in the form in which the layer stores it: packed, or as it is."""
        if name not in self.packed_names:
            return weight
        return quantize(weight, self.form).view(torch.float32)

    def plain_weight(self, name: str) -> Tensor:
        """The dequantised weight."""
        whole = super().plain_weight(name)
        return self.dense_weight(whole) if name == "weight" else whole


def quantize_layers(
    model: PreTrainedModel,
    form: str,
    unquantised: Sequence[str],
    learning: ParallelismConfig | None = None,
) -> None:
    """Has linear layers and stacks of experts of a whole model be quantised, in place.

    The head stays as it is, and so do modules whose names are, or end with, one of `unquantised`.
    What is not quantised but might be thought to be is named in the log. Where adapters learn
    beside the weights, `learning` is in which layout. Raises `UserError` for stacks and a schedule
    of it that computes the gradients of weights by themselves.
    """

    def stays(name: str) -> bool:
        return any(f".{name}.".endswith(f".{end}.") for end in unquantised)

    for name, layer in plain_linears(model).items():
        if layer is not model.get_output_embeddings() and not stays(name):
            wrap(layer, Quantized, form=form, dense_shape=tuple(layer.weight.shape))
    for name, module in model.named_modules():
        if stacks_in(module) and not stays(name):
            quantize_stacks(module, form)
    if learning is not None and splits_backward(learning) and quantized_stacks(model):
        raise UserError(
            "quantization.base, parallelism.pipeline_parallel_schedule: a schedule that computes "
            "the gradients of weights by themselves would dequantise the experts anew for each: "
            "set the second to 1F1B, Interleaved1F1B, LoopedBFS or GPipe."
        )
    left = matrices_left(model)
    if left:
        told = "quantization.base: %d weights beside linear layers stay as they are: %s"
        logger.warning(told, len(left), f"{', '.join(left[:3])}{', …' if left[3:] else ''}")


def quantized_modules(model: nn.Module) -> dict[str, Quantized]:
    """The layers whose weights are quantised, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Quantized)}


def pack_layers(model: nn.Module) -> None:
    """Replaces the quantised weights of a model on the meta device by packed ones, in place."""
    for layer in quantized_modules(model).values():
        packed = layer.weight.new_empty(layer.packed_bytes // 4, dtype=torch.float32)
        layer.weight = nn.Parameter(packed, requires_grad=False)
    for stacks in quantized_stacks(model).values():
        stacks.pack()
