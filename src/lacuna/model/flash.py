"""FlashAttention 4 in the place of torch's own FlashAttention, for the GPUs that it is made for."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from transformers import PretrainedConfig

from lacuna.config import UserError
from lacuna.model.architecture import head_dim, layer_settings
from lacuna.model.attention import PACKED
from lacuna.model.attention_choice import has_dropout
from lacuna.parallel.mesh import Layout

# The widest heads that FlashAttention 4 takes, by the GPU's major compute capability.
_WIDEST = {9: 256, 10: 128}


def install_flash_attention_4(model_config: PretrainedConfig, layout: Layout) -> str:
    """Has FlashAttention 4 compute our attention where it can, and says what computes attention.

    It is not used with context or pipeline parallelism, since it has not been tried on the empty
    pieces of documents that these make, nor with dropout, which it would leave out wherever else
    torch calls its FlashAttention.
    """
    chosen: str = model_config._attn_implementation
    suits = chosen == PACKED and layout.cp * layout.pp == 1 and not has_dropout(model_config)
    if not suits:
        return chosen
    widest = _WIDEST.get(torch.cuda.get_device_capability()[0], 0)
    widths = [head_dim(layer) for layer in layer_settings(model_config.get_text_config())]
    if any(width > widest or width % 8 for width in widths):
        return chosen
    use_flash_attention_4()
    return f"{chosen}, by FlashAttention 4"


@cache
def use_flash_attention_4(device_type: str = "cuda") -> Library:
    """Has the package flash-attn-4 compute, from now on, whatever torch's FlashAttention would.

    That includes `varlen_attn`, which is then twice as fast on the newest GPUs. torch's own
    `activate_flash_attention_impl` will not do: that of torch 2.11 refuses the window by which
    `varlen_attn` says causal, and later ones take two results of a forward pass that has five.
    Raises `UserError` where the package cannot be imported.
    """
    try:
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    except ImportError as error:
        raise UserError(
            f"model.attention: the package flash-attn-4 is installed, but not what it needs "
            f"({error}): install all of it (pip install -e '.[flash]' -c constraints.txt), or "
            "uninstall it, and torch's own FlashAttention is used."
        ) from error

    # Its compiler warns of the package's own code.
    warnings.filterwarnings("ignore", message="Argument aux_data")

    def forward(
        query: Tensor, key: Tensor, value: Tensor, *settings: Any, **options: Any
    ) -> tuple[Tensor, ...]:
        told = _flash_arguments(*settings, **options)
        output, lse, *_ = _flash_attn_fwd(query, key, value, **told, return_lse=True)
        # The other three are the state of torch's dropout, of which there is none.
        return output, lse, *[query.new_empty(0)] * 3

    def backward(grad: Tensor, *given: Any, **options: Any) -> tuple[Tensor, ...]:
        query, key, value, output, lse, *settings = given
        told = _flash_arguments(*settings, **options)
        told["deterministic"] = torch.are_deterministic_algorithms_enabled()
        grads: tuple[Tensor, ...] = _flash_attn_bwd(query, key, value, output, grad, lse, **told)
        return grads

    library = Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, device_type.upper())
    library.impl("_flash_attention_backward", backward, device_type.upper())
    return library


def _flash_arguments(
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    *_: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **__: Any,
) -> dict[str, Any]:
    """The arguments of torch's operators under the package's names.

    torch says -1 for a window without end, and the package None.
    """
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "window_size_left": None if window_size_left == -1 else window_size_left,
        "window_size_right": None if window_size_right == -1 else window_size_right,
        "causal": causal,
        "softmax_scale": scale,
    }
