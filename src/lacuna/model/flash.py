"""FlashAttention 4 where torch has FlashAttention 2, which is half as fast on the newest GPUs."""

import warnings
from functools import cache
from importlib.metadata import distributions
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

# The widest heads that it knows, by the GPU's major compute capability.
_WIDEST = {9: 256, 10: 128}


def has_flash_attention_4(head_dim: int) -> bool:
    """Whether the package flash-attn-4 is installed, and knows this GPU and heads this wide."""
    # By its name: packages of FlashAttention 2 have a module of the same name, which is older and lacks much.
    if not (any(distributions(name="flash-attn-4")) and torch.cuda.is_available()):
        return False
    return head_dim % 8 == 0 and head_dim <= _WIDEST.get(torch.cuda.get_device_capability()[0], 0)


@cache
def use_flash_attention_4(device_type: str = "cuda") -> Library:
    """From now on has the package compute what torch's FlashAttention does, which `varlen_attn` is.

    torch's own `activate_flash_attention_impl` does not do it: torch 2.11's refuses the window by which `varlen_attn`
    says causal, and others take two results of a forward pass that has five.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    warnings.filterwarnings("ignore", message="Argument aux_data")  # of its compiler, on its own code

    def forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any, **options: Any) -> tuple[Tensor, ...]:
        output, lse, *_ = _flash_attn_fwd(query, key, value, **_told(*settings, **options), return_lse=True)
        return output, lse, *[query.new_empty(0)] * 3  # torch's state of the dropout, of which there is none

    def backward(grad: Tensor, *given: Any, **options: Any) -> tuple[Tensor, ...]:
        query, key, value, output, lse, *settings = given
        told = _told(*settings, **options) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        return _flash_attn_bwd(query, key, value, output, grad, lse, **told)

    library = Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, device_type.upper())
    library.impl("_flash_attention_backward", backward, device_type.upper())
    return library


def _told(
    cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int, dropout: float, causal: bool, *_: Any,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None, **__: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of torch's operators by the package's names; torch says -1 for a window without end."""
    bounds = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    left, right = (None if size == -1 else size for size in (window_size_left, window_size_right))
    return bounds | {"window_size_left": left, "window_size_right": right, "causal": causal, "softmax_scale": scale}
