"""Adapters of stacks of experts' weights, in the same form as peft's.

A stack is a parameter [experts, out, in], or [experts, in, out] of a module that `is_transposed`.
Its adapter is lora_A [experts * rank, in] and lora_B [out, rank * experts]. A module itself has the
adapter of its last stack, its child `base_layer` that of the stack before, and so on, as in peft's
files.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lacuna.model.layers.linear import is_transposed
from lacuna.model.layers.lora import PARTS, Adapter, add_factors
from lacuna.model.layers.wrapping import Wrapper, stored_parameter, whole_tensor, wrap


class _WithWeights:
    """Stands for a module in its own code, and has other weights.

    Compiled code could not put the weights into the module itself.
    """

    def __init__(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        self.module = module
        self.weights = weights

    def __getattr__(self, name: str) -> Any:
        return self.weights[name] if name in self.weights else getattr(self.module, name)


class _Factors(nn.Module):
    """Has the adapter of a stack that is not its module's last."""

    lora_A: Tensor
    lora_B: Tensor
    base_layer: "_Factors"


class ChangedStacks(Wrapper):
    """A module whose own code computes with other stacks than it stores.

    Attributes:
        changed: the names of the stacks.
        plain_forward: the module's own code. Compiled code cannot take it from `super`.
    """

    changed: tuple[str, ...]
    plain_forward: Callable[..., Any]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's output with the changed stacks."""
        return self.compute(*inputs, **named)

    def compute(self, *inputs: Any, **named: Any) -> Any:
        """What the module's own code makes of its inputs with the changed stacks."""
        weights = {name: self.used_stack(name) for name in self.changed}
        return type(self).plain_forward(_WithWeights(self, weights), *inputs, **named)

    def used_stack(self, name: str) -> Tensor:
        """The stack of this name with which the module's own code computes."""
        stack: Tensor = getattr(self, name)
        return stack


def change_stacks(
    module: nn.Module, wrapper: type[ChangedStacks], names: Sequence[str], **known: Any
) -> ChangedStacks:
    """Has a wrapper change the stacks of these names of a module, in place.

    What is `known` becomes attributes of its class.
    """
    changed = tuple(names)
    own = type(module).forward
    if isinstance(module, ChangedStacks):  # its own code is further within
        changed = tuple(dict.fromkeys((*module.changed, *names)))
        own = type(module).plain_forward
    return wrap(module, wrapper, changed=changed, plain_forward=own, **known)


class LoraStacks(Adapter, ChangedStacks):
    """A module that computes with its stacks changed by adapters.

    Attributes:
        stacks: the names of the stacks, from the one whose adapter is innermost.
    """

    stacks: tuple[str, ...]
    base_layer: _Factors

    def used_stack(self, name: str) -> Tensor:
        """The stack with its adapter, if it has one."""
        stack = super().used_stack(name)
        if name not in self.stacks:
            return stack
        holder = dict(self.holders())[name]
        return self.merged(stack, holder.lora_A, holder.lora_B)

    def holders(self) -> Iterator[tuple[str, "LoraStacks | _Factors"]]:
        """The name of each stack, and the module that has its adapter."""
        holder: LoraStacks | _Factors = self
        yield self.stacks[-1], holder
        for name in reversed(self.stacks[:-1]):
            holder = holder.base_layer
            yield name, holder

    def merged(self, stack: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """A `stack` with the scaled products of these factors added to it."""
        down = down.unflatten(0, (len(stack), -1))
        up = up.unflatten(1, (-1, len(stack))).permute(2, 0, 1)
        change = self.adapter_scale * up @ down
        return stack + (change.mT if is_transposed(self) else change).to(stack.dtype)

    def plain_weight(self, name: str) -> Tensor:
        """The stack with its adapter merged into it."""
        whole = super().plain_weight(name)
        if name not in self.stacks:
            return whole
        holder = dict(self.holders())[name]
        down, up = (whole_tensor(stored_parameter(holder, part)).float() for part in PARTS[:2])
        return self.merged(whole.float(), down, up)


def add_stack_adapters(
    model: nn.Module, names: Sequence[str], rank: int, scale: float, dtype: torch.dtype
) -> None:
    """Gives the stacks of these names empty adapters of this dtype, in place."""
    for place, module in [*model.named_modules()]:
        stacks = tuple(part for part in module._parameters if f"{place}.{part}" in names)
        if not stacks:
            continue
        holder = module
        for name in reversed(stacks):
            if name != stacks[-1]:
                inner = _Factors()
                holder.base_layer = inner
                holder = inner
            stack = stored_parameter(module, name)
            shown = stack.mT if is_transposed(module) else stack
            add_factors(holder, rank * len(stack), shown, dtype)
        change_stacks(module, LoraStacks, stacks, adapter_scale=scale, stacks=stacks)
