"""Stacks of experts with frozen, quantised weights, which are dequantised where they are used.

Each expert's matrix is packed by itself, in a row of its own, so that experts can be sharded,
spread over ranks and saved one by one. The products are those of the model's own code, with stacks
that exist only while a layer computes: nothing dequantised is kept for the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from lacuna.model.layers.bits import dequantize_stack, packed_sizes, quantize_stack
from lacuna.model.layers.linear import PlainLinear, is_matrix
from lacuna.model.layers.stacks import ChangedStacks, change_stacks
from lacuna.model.layers.wrapping import Place, stored_parameter

# The products of tokens with experts. What adapters add to a stack is a product of another kind.
_PRODUCTS = ("aten::_grouped_mm", "aten::mm", "aten::addmm", "transformers::grouped_mm_fallback")


@torch.library.custom_op("lacuna::dequantized_stack", mutates_args=())
def dequantized_stack(
    packed: Tensor, form: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Unpacks a stack of matrices of this shape, as one operation that compilers leave alone."""
    return dequantize_stack(packed, form, shape, dtype)


@dequantized_stack.register_fake
def _(packed: Tensor, form: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(len(packed), *shape, dtype=dtype)


def _save_products(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Saves what takes longest to compute again, which is not large; never a stack."""
    is_kept = operation.name() in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.MUST_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_products)


class QuantizedStacks(ChangedStacks):
    """A module that computes with quantised stacks.

    They are stored packed; or they are stored as files have them, and quantised whenever they are
    used.

    Attributes:
        form: how they are quantised: nf4 or int8.
        dense_shapes: the name of each stack, and the shape of one expert's matrix in it.
        dense_dtype: the dtype of dequantised stacks.
    """

    place = Place.PRODUCT
    form: str
    dense_shapes: tuple[tuple[str, tuple[int, int]], ...]
    dense_dtype: torch.dtype

    @property
    def packed_names(self) -> tuple[str, ...]:
        """The names of the stacks that are stored as bytes that are no numbers."""
        names = [name for name, _ in self.dense_shapes]
        return tuple(name for name in names if stored_parameter(self, name).ndim == 2)

    def packed_bytes(self, name: str) -> int:
        """How many bytes one expert of a stack takes when it is packed."""
        return sum(packed_sizes(self.form, dict(self.dense_shapes)[name]))

    def pack(self) -> None:
        """Replaces the stacks of a module on the meta device by packed ones, in place."""
        for name, _ in self.dense_shapes:
            stack = stored_parameter(self, name)
            sizes = len(stack), self.packed_bytes(name) // 4
            packed = stack.new_empty(sizes, dtype=torch.float32)
            setattr(self, name, nn.Parameter(packed, requires_grad=False))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's output. What would keep a stack for the backward pass is computed anew."""
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        # transformers adds the biases of experts to products in place, so that what was kept would
        # not be what the product made.
        if not getattr(self, "has_bias", False):
            settings["context_fn"] = _contexts
        return checkpoint(self.compute, *inputs, **settings, **named)

    def used_stack(self, name: str) -> Tensor:
        """The dequantised stack."""
        stack = super().used_stack(name)
        shapes = dict(self.dense_shapes)
        if name not in shapes:
            return stack
        packed = stack if stack.ndim == 2 else quantize_stack(stack, self.form)
        dense: Tensor = dequantized_stack(packed, self.form, shapes[name], self.dense_dtype)
        return dense

    def stored_weight(self, name: str, weight: Tensor) -> Tensor:
        """The stack in the form in which the module stores it: packed, or as it is."""
        if name not in self.packed_names:
            return weight
        return quantize_stack(weight, self.form).view(torch.float32)

    def plain_weight(self, name: str) -> Tensor:
        """The dequantised stack, in float32."""
        whole = super().plain_weight(name)
        shapes = dict(self.dense_shapes)
        if name not in shapes:
            return whole
        packed = whole if whole.ndim == 2 else quantize_stack(whole, self.form)
        return dequantize_stack(packed, self.form, shapes[name], torch.float32)


def stacks_in(module: nn.Module) -> list[str]:
    """The names of the stacks of experts' matrices that a module itself has."""
    if "Experts" not in type(module).__name__:
        return []
    weights = module.named_parameters(recurse=False)
    return [
        name for name, weight in weights if weight.ndim == 3 and is_matrix(module, name, weight)
    ]


def quantize_stacks(module: nn.Module, form: str) -> None:
    """Has a module compute with quantised stacks, in place."""
    names = stacks_in(module)
    stacks = {name: stored_parameter(module, name) for name in names}
    change_stacks(
        module,
        QuantizedStacks,
        names,
        form=form,
        dense_shapes=tuple((name, tuple(stack.shape[1:])) for name, stack in stacks.items()),
        dense_dtype=stacks[names[0]].dtype,
    )


def quantized_stacks(model: nn.Module) -> dict[str, QuantizedStacks]:
    """The modules whose stacks are quantised, by name."""
    named = model.named_modules()
    return {name: module for name, module in named if isinstance(module, QuantizedStacks)}


def matrices_left(model: PreTrainedModel) -> list[str]:
    """The names of the matrices beside linear layers that a model of quantised ones has left.

    They are stacks whose modules are no experts of transformers', and experts in no stack. The
    small ones of convolutions, routers and embeddings do not count.
    """
    found = []
    for path, module in model.named_modules():
        if isinstance(module, PlainLinear | nn.modules.conv._ConvNd | QuantizedStacks):
            continue
        for name, weight in module.named_parameters(recurse=False):
            is_stack = weight.ndim > 2 or "expert" in path.lower()
            if is_stack and is_matrix(module, name, weight):
                found.append(f"{path}.{name}")
    return found
