"""Which modules hold the stacked experts of a layer, as transformers has them."""

from collections.abc import Iterable

from torch import nn

MIXED = "lora_B"  # the factor of a stack's adapter whose columns go round all experts


def stacks_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The parts of `modules` that hold the stacked experts of a layer, spread or not."""
    parts = (part for module in modules for part in module.modules())
    return [part for part in parts if hasattr(part, "is_transposed") and experts_in(part)]


def experts_in(part: nn.Module) -> int:
    """The number of experts on all ranks whose stacks a module holds; 0 if it holds others too.

    Adapters of the stacks do not count.
    """
    leading = {
        parameter.shape[0] if parameter.ndim else 0
        for name, parameter in part.named_parameters()
        if not name.endswith(("lora_A", MIXED))
    }
    alone = len(leading) == 1 and hasattr(part, "num_experts") and not [*part.buffers()]
    return leading.pop() if alone else 0
