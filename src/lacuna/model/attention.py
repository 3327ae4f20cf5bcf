"""Attention that keeps packed documents apart: which implementation, the one of ours, and what kernel computes it."""

import inspect
import warnings
from functools import cache
from importlib.metadata import distributions
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.library import Library
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as soft_capped_attention

from lacuna.config import Config, refuse
from lacuna.model.architecture import head_dim
from lacuna.parallel.context import Part, flash_bounds, gather_sequence, ring_attention, visible
from lacuna.parallel.mesh import Layout

PACKED = "lacuna_packed"
HALF = (torch.bfloat16, torch.float16)
# The widest heads that FlashAttention 4 knows, by the GPU's major compute capability.
_WIDEST = {9: 256, 10: 128}
# torch 2.11 takes grouped heads without being told; later versions want the argument.
_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, parts: tuple[Part, ...] = (), group: ProcessGroup | None = None,
    ring: tuple[Tensor, int] | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention within documents, for transformers' interface, also of a rank's share of a sequence.

    `query` [B, heads, T, D], `key` and `value` [B, key_value_heads, T, D]; `parts` say which queries see which keys.
    With context parallelism T is this rank's share; the keys of the others come over `group`: by a ring if `ring` has
    the bounds of documents and the longest of them, gathered where a ring cannot be. Returns [B, T, heads, D].
    """
    assert parts, f"{type(module).__name__} dropped what it was told of the documents"
    if ring is not None and sliding_window is None and softcap is None and not dropout:
        return ring_attention(query, key, value, *ring, group, scaling).transpose(1, 2), None
    if group is not None:
        key, value = gather_sequence(key, 2, group), gather_sequence(value, 2, group)
    flash = query.is_cuda and query.dtype in HALF and not dropout and softcap is None
    outputs = []
    for part, queries in zip(parts, query.chunk(len(parts), 2), strict=True):
        seen = (queries, key[:, :, : part.stop], value[:, :, : part.stop], part, scaling, sliding_window)
        unmasked = part.whole and sliding_window is None
        outputs.append(_flash(*seen) if flash and not unmasked else _plain(*seen, softcap, dropout, module))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


AttentionInterface.register(PACKED, packed_attention)


def _flash(query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float | None, window: int | None) -> Tensor:
    """torch's `varlen_attn` (FlashAttention); half precision on a GPU only. Returns [B, T, heads, D]."""
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    grouped = {"enable_gqa": True} if _TAKES_GQA and query.shape[1] != key.shape[1] else {}
    sees = (-1 if window is None else window - 1, 0)
    output = varlen_attn(*flat, *flash_bounds(part, query.shape[2]), scale=scaling, window_size=sees, **grouped)
    return output.unflatten(0, (len(query), query.shape[2]))


def _plain(
    query: Tensor, key: Tensor, value: Tensor, part: Part,
    scaling: float | None, window: int | None, softcap: float | None, dropout: float, module: nn.Module,
) -> Tensor:  # fmt: skip
    """torch's own attention, or with a soft cap transformers'. Returns [B, T, heads, D].

    Without a mask where rows are one document each: torch then chooses among all its kernels (cuDNN's on new GPUs).
    """
    unmasked = part.whole and window is None and softcap is None
    mask = None if unmasked else visible(part, query.shape[0], query.shape[2], window)[:, None]
    if softcap is not None:
        added = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        return soft_capped_attention(module, query, key, value, added, dropout, scaling, softcap)[0]
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    output = F.scaled_dot_product_attention(query, key, value, mask, dropout, unmasked, **options)
    return output.transpose(1, 2).contiguous()


def choose_attention(
    config: Config, model_config: PretrainedConfig, device_type: str, dtype: torch.dtype, layout: Layout
) -> str:
    """transformers' name of the attention to use, by `model.attention`, the layout, the device, and the model's needs.

    Raises `UserError` for an implementation that the layout, the device, the dtype or the model cannot have.
    """
    asked, text_config = config.model.attention, model_config.get_text_config()
    model_class = AutoModelForCausalLM._model_mapping[type(model_config)]
    soft_capped = getattr(text_config, "attn_logit_softcapping", None) is not None
    dropout = _has_dropout(text_config)
    exchangeable = model_class._supports_attention_backend and (soft_capped or model_class._supports_sdpa)
    flash, shared = asked in ("varlen", "flash_attention_2", "flash_attention_3"), layout.sharing > 1
    uncapped = soft_capped and not shared and asked in ("sdpa", "varlen")
    unshared = shared and asked not in ("auto", "varlen")
    reasons = {
        'needs a GPU; this run is on the CPU: use "auto" or "sdpa"': flash and device_type != "cuda",
        'has half precision only: drop training.mixed_precision_param, or use "sdpa"': flash and dtype not in HALF,
        'has no backward pass on a CPU: use "auto" or "sdpa"': asked == "flex_attention" and device_type != "cuda",
        'has no dropout, and the model has: set it to 0, or use "sdpa"': asked == "varlen" and dropout,
        'would leave out the model\'s soft cap: use "auto" or "eager"': uncapped,
        'needs whole sequences, which tensor, context and pipeline parallelism share out: use "auto"': unshared,
        f"cannot be had: {model_class.__name__} computes its attention by code of its own, which knows nothing of "
        "shares of a sequence: use data parallelism only": shared and not exchangeable,
    }
    refuse({f'model.attention: "{asked}" {reason}': applies for reason, applies in reasons.items()})
    if shared or asked == "varlen":
        return PACKED  # only our own attention knows what a rank has of the documents
    if asked != "auto":
        return asked
    if soft_capped or not model_class._supports_sdpa:
        return "eager"  # the others would silently leave a soft cap out
    fast = device_type == "cuda" and dtype in HALF and exchangeable and not dropout
    return PACKED if fast and config.data.document_mask else "sdpa"


def _has_dropout(text_config: PretrainedConfig) -> bool:
    return any(getattr(text_config, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))


def choose_kernels(model_config: PretrainedConfig, layout: Layout) -> str:
    """Has FlashAttention 4 compute our attention where that can be; says what computes the model's.

    Not with context or pipeline parallelism, whose empty pieces of documents it has not been tried on, and not with
    dropout, which it would leave out wherever else torch calls its FlashAttention.
    """
    chosen, text_config = model_config._attn_implementation, model_config.get_text_config()
    suits = chosen == PACKED and layout.cp * layout.pp == 1 and not _has_dropout(text_config)
    # By its name: packages of FlashAttention 2 have a module of the same name, which is older and lacks much.
    installed = any(distributions(name="flash-attn-4")) and torch.cuda.is_available()
    widest = _WIDEST.get(torch.cuda.get_device_capability()[0], 0) if suits and installed else 0
    if head_dim(text_config) > widest or head_dim(text_config) % 8:
        return chosen
    use_flash_attention_4()
    return f"{chosen}, by FlashAttention 4"


@cache
def use_flash_attention_4(device_type: str = "cuda") -> Library:
    """From now on has the package flash-attn-4 compute what torch's FlashAttention does, which `varlen_attn` is.

    On the newest GPUs it is twice as fast. torch's own `activate_flash_attention_impl` does not do it: torch 2.11's
    refuses the window by which `varlen_attn` says causal, and others take two results of a forward pass that has five.
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
