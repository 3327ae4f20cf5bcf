"""Adapters of stacks of experts' weights, as peft has them.

A stack is a parameter [experts, out, in], or [experts, in, out] of a module that `is_transposed`.
Its adapter is lora_A [experts * rank, in] and lora_B [out, rank * experts]. A module holds that of
its last stack, its child `base_layer` that of the one before, and so on, as peft's files do.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.lora import PARTS, Adapter, add_factors
from lacuna.model.layers.wrapping import whole_tensor, wrap


class _Seen:
    """A module as its own code sees it, with other weights.

    These cannot be put into the module itself: no code that is compiled may do that.
    """

    def __init__(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        self.module = module
        self.weights = weights

    def __getattr__(self, name: str) -> Any:
        return self.weights[name] if name in self.weights else getattr(self.module, name)


class LoraStacks(Adapter):
    """A module that computes with what adapters make of its stacks.

    Attributes:
        stacks: the names of these, from the one whose adapter is furthest in.
    """

    stacks: tuple[str, ...]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module computes with the changed stacks."""
        if not self.adapter_is_on:
            return super().forward(*inputs, **named)
        changed = {
            name: self.changed(getattr(self, name), holder.lora_A, holder.lora_B)
            for name, holder in self.holders()
        }
        return super().forward.__func__(_Seen(self, changed), *inputs, **named)

    def holders(self) -> Iterator[tuple[str, nn.Module]]:
        """The names of the stacks, and the module that has the adapter of each."""
        holder: nn.Module = self
        yield self.stacks[-1], holder
        for name in reversed(self.stacks[:-1]):
            holder = holder.base_layer
            yield name, holder

    def changed(self, stack: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """A `stack` with the products of these factors in it."""
        down = down.unflatten(0, (len(stack), -1))
        up = up.unflatten(1, (-1, len(stack))).permute(2, 0, 1)
        change = self.adapter_scale * up @ down
        return stack + (change.mT if is_transposed(self) else change).to(stack.dtype)

    def plain_weight(self, name: str) -> Tensor:
        """The stack with its adapter in it."""
        whole = super().plain_weight(name)
        if name not in self.stacks:
            return whole
        held = dict(self.holders())[name]._parameters
        down, up = (whole_tensor(held[part]).float() for part in PARTS[:2])
        return self.changed(whole.float(), down, up)


def add_stack_adapters(
    model: nn.Module, names: Sequence[str], rank: int, scale: float, dtype: torch.dtype
) -> None:
    """Gives the stacks of these names adapters, empty and of this dtype, in place."""
    for place, module in [*model.named_modules()]:
        stacks = tuple(part for part in module._parameters if f"{place}.{part}" in names)
        if not stacks:
            continue
        holder = module
        for name in reversed(stacks):
            if name != stacks[-1]:
                holder.base_layer = nn.Module()
                holder = holder.base_layer
            stack = module._parameters[name]
            shown = stack.mT if is_transposed(module) else stack
            add_factors(holder, rank * len(stack), shown, dtype)
        wrap(module, LoraStacks, adapter_scale=scale, stacks=stacks)
