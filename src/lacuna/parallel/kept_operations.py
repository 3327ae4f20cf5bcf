"""Activation checkpointing by operation: whose results are kept."""

import itertools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.parallel.recompute import halved_every

# The names of operations, or how these begin.
_GROUPED = ("aten::_grouped_mm", "aten::_scaled_grouped_mm")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", *_GROUPED)
KEPT = (  # attention and communication
    "aten::_scaled_dot_product_",
    "torch_attn::_varlen_attn",
    "lacuna::merged_attention",
    "lacuna::ring_attention",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_to_all_single",
)


def keeping_operations(settings: ActivationCheckpointConfig, layer: int) -> Callable[[], Any]:
    """The `context_fn` by which a layer keeps what takes longest to compute again.

    Layers are counted from 0; `op/4` keeps half of the products of every fourth layer.
    """
    is_halved = (layer + 1) % halved_every(settings) == 0
    return _half_of_products if is_halved else _all_products


# Functions, since of nothing else the compiler makes one graph.
def _half_of_products() -> Any:
    return create_selective_checkpoint_contexts(_saving_policy(True, False))


def _all_products() -> Any:
    return create_selective_checkpoint_contexts(_saving_policy(True))


def _saving_policy(*products: bool) -> Callable[..., CheckpointPolicy]:
    """A policy that saves what takes longest to compute again.

    That is attention, communication, and of every so many `products` those that it says. Those of
    experts are counted apart, of which every second is kept. So are the forward pass and its
    repetition. Products with a narrow matrix, such as an adapter's, do not count: a result that is
    narrow takes no memory, and is kept, and a wide one takes no time.
    """
    keep_product = {
        (grouped, again): itertools.cycle((True, False) if grouped else products)
        for grouped, again in itertools.product((True, False), repeat=2)
    }

    def policy(context: Any, operation: Any, *factors: Any, **_: Any) -> CheckpointPolicy:
        name = operation.name()
        kept = name.startswith(KEPT)
        if name in PRODUCTS:
            inner, width = factors[2 if name == "aten::addmm" else 1].shape[-2:]
            if _is_narrow(inner, width):
                kept = width < inner
            else:
                kept = next(keep_product[name in _GROUPED, context.is_recompute])
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _is_narrow(*sides: int) -> bool:
    """Whether a matrix with these sides is narrow: up to 256, and an eighth of the other side.

    A GPU adds up some 256 products in the time that it takes to write a result of two bytes. The
    eighth leaves the matrices of small models alone.
    """
    return min(sides) <= min(256, max(sides) // 8)
