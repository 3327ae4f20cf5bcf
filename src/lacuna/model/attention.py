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
from transformers.models.gemma2.modeling_gemma2 import (
    eager_attention_forward as soft_capped_attention,
)

from lacuna.config import Config, UserError
from lacuna.model.architecture import head_dim, is_soft_capped, layer_settings
from lacuna.model.sinks import sink_attention
from lacuna.parallel.context import gather_sequence, ring_attention
from lacuna.parallel.mesh import Layout
from lacuna.parallel.partial_attention import Part, flash_bounds, visible

PACKED = "lacuna_packed"
HALF = (torch.bfloat16, torch.float16)
# The widest heads that FlashAttention 4 knows, by the GPU's major compute capability.
_WIDEST = {9: 256, 10: 128}
# torch 2.11 takes grouped heads without being told; later versions want the argument.
_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    parts: tuple[Part, ...] = (),
    group: ProcessGroup | None = None,
    ring: tuple[Tensor, int] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, for transformers' interface, also of a share of a sequence.

    `query` [B, heads, T, D], `key` [B, key_value_heads, T, D], `value` [B, key_value_heads, T,
    any]; `s_aux` [heads] are sinks; `parts` say which queries see which keys. With context
    parallelism T is this rank's share; the keys of the others come over `group`: by a ring if
    `ring` has the bounds of documents and the longest of them, gathered where a ring cannot be.
    Returns [B, T, heads, width of values].
    """
    assert parts, f"{type(module).__name__} dropped what it was told of the documents"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    bare = sliding_window is None and softcap is None and s_aux is None and not dropout
    if ring is not None and bare:
        width = value.shape[-1]
        output = ring_attention(*_of_one_width(query, key, value), *ring, group, scaling)
        return output[..., :width].transpose(1, 2), None
    if group is not None:
        key, value = gather_sequence(key, 2, group), gather_sequence(value, 2, group)
    flash = query.is_cuda and query.dtype in HALF and not dropout and softcap is None
    outputs = []
    for part, queries in zip(parts, query.chunk(len(parts), 2), strict=True):
        keys, values = key[:, :, : part.stop], value[:, :, : part.stop]
        seen = (queries, keys, values, part, scaling, sliding_window)
        if s_aux is not None:
            outputs.append(_with_sinks(*seen, s_aux))
        elif flash and not (part.whole and sliding_window is None):
            outputs.append(_flash(*seen))
        else:
            outputs.append(_plain(*seen, softcap, dropout, module))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


AttentionInterface.register(PACKED, packed_attention)


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """All with heads as wide as the widest, by zeros behind: kernels know no narrower values (MLA).

    Scores stay as they are, and of the output the first part is that of the values.
    """
    widest = max(query.shape[-1], value.shape[-1])
    return tuple(F.pad(one, (0, widest - one.shape[-1])) for one in (query, key, value))


def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float,
    window: int | None,
    sinks: Tensor,
) -> Tensor:
    """Attention beside sinks. Returns [B, T, heads, width of values]."""
    tensors = (one.transpose(1, 2) for one in _of_one_width(query, key, value))
    output = sink_attention(*tensors, sinks, part, scaling, window)
    return output[..., : value.shape[-1]]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float, window: int | None
) -> Tensor:
    """torch's `varlen_attn` (FlashAttention); half precision on a GPU only.

    Returns [B, T, heads, width of values].
    """
    tensors = _of_one_width(query, key, value)
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
    grouped = {"enable_gqa": True} if _TAKES_GQA and query.shape[1] != key.shape[1] else {}
    sees = (-1 if window is None else window - 1, 0)
    bounds = flash_bounds(part, query.shape[2])
    output = varlen_attn(*flat, *bounds, scale=scaling, window_size=sees, **grouped)
    return output.unflatten(0, (len(query), query.shape[2]))[..., : value.shape[-1]]


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
    module: nn.Module,
) -> Tensor:
    """torch's own attention, or with a soft cap transformers'. Returns [B, T, heads, D].

    Without a mask where rows are one document each: torch then chooses among all its kernels
    (cuDNN's on new GPUs).
    """
    unmasked = part.whole and window is None and softcap is None
    mask = None if unmasked else visible(part, query.shape[0], query.shape[2], window)[:, None]
    if softcap is not None:
        added = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        return soft_capped_attention(module, query, key, value, added, dropout, scaling, softcap)[0]
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    output = F.scaled_dot_product_attention(query, key, value, mask, dropout, unmasked, **options)
    return output.transpose(1, 2).contiguous()


def attention_choices(
    config: Config,
    model_config: PretrainedConfig,
    device_type: str,
    dtype: torch.dtype,
    layout: Layout,
) -> tuple[str, ...]:
    """transformers' names of the attention that a run may have, the best first.

    By `model.attention`, the layout, the device, and the model's needs; which of them computes what
    the model does remains to be tried. Raises `UserError` for an implementation that the layout,
    the device, the dtype or the model cannot have.
    """
    asked = config.model.attention
    shared = layout.sharing > 1
    model_class = AutoModelForCausalLM._model_mapping[type(model_config)]
    exchangeable = model_class._supports_attention_backend
    reason = _reason_against(asked, model_config, device_type, dtype, shared)
    if reason is not None:
        raise UserError(f'model.attention: "{asked}" {reason}.')
    if shared and not exchangeable:
        raise UserError(
            f'model.attention: "{asked}" cannot be had: {model_class.__name__} computes its '
            "attention by code of its own, which knows nothing of shares of a sequence: use data "
            "parallelism only."
        )
    if shared or asked == "varlen":
        return (PACKED,)  # only our own attention knows what a rank has of the documents
    if asked != "auto":
        return (asked,)
    # All but eager would silently leave a soft cap out.
    plain = model_class._supports_sdpa and not is_soft_capped(model_config)
    own = ("sdpa", "eager") if plain else ("eager",)
    if not exchangeable:
        return own
    fast = device_type == "cuda" and dtype in HALF and not _has_dropout(model_config)
    if fast and plain and config.data.document_mask:
        return (PACKED, *own)
    return (*own, PACKED)


def _reason_against(
    asked: str,
    model_config: PretrainedConfig,
    device_type: str,
    dtype: torch.dtype,
    shared: bool,
) -> str | None:
    """Why the attention that is asked for cannot be had, and what to do; None if it can."""
    flash = asked in ("varlen", "flash_attention_2", "flash_attention_3")
    if flash and device_type != "cuda":
        return 'needs a GPU; this run is on the CPU: use "auto" or "sdpa"'
    if flash and dtype not in HALF:
        return 'has half precision only: drop training.mixed_precision_param, or use "sdpa"'
    if asked == "flex_attention" and device_type != "cuda":
        return 'has no backward pass on a CPU: use "auto" or "sdpa"'
    if asked == "varlen" and _has_dropout(model_config):
        return 'has no dropout, and the model has: set it to 0, or use "sdpa"'
    if asked in ("sdpa", "varlen") and not shared and is_soft_capped(model_config):
        return 'would leave out the model\'s soft cap: use "auto" or "eager"'
    if shared and asked not in ("auto", "varlen"):
        return 'needs whole sequences, which tensor, context and pipeline parallelism share out: use "auto"'
    return None


def _has_dropout(model_config: PretrainedConfig) -> bool:
    text_config = model_config.get_text_config()
    return any(getattr(text_config, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))


def install_fastest_kernels(model_config: PretrainedConfig, layout: Layout) -> str:
    """Has FlashAttention 4 compute our attention where that can be; says what computes the model's.

    Not with context or pipeline parallelism, whose empty pieces of documents it has not been tried
    on, and not with dropout, which it would leave out wherever else torch calls its FlashAttention.
    """
    chosen, text_config = model_config._attn_implementation, model_config.get_text_config()
    suits = chosen == PACKED and layout.cp * layout.pp == 1 and not _has_dropout(model_config)
    # By its name: packages of FlashAttention 2 have a module of the same name, which is older and
    # lacks much.
    installed = any(distributions(name="flash-attn-4")) and torch.cuda.is_available()
    widest = _WIDEST.get(torch.cuda.get_device_capability()[0], 0) if suits and installed else 0
    if any(
        head_dim(layer) > widest or head_dim(layer) % 8 for layer in layer_settings(text_config)
    ):
        return chosen
    use_flash_attention_4()
    return f"{chosen}, by FlashAttention 4"


@cache
def use_flash_attention_4(device_type: str = "cuda") -> Library:
    """From now on has the package flash-attn-4 compute what torch's FlashAttention does, which `varlen_attn` is.

    On the newest GPUs it is twice as fast. torch's own `activate_flash_attention_impl` does not do
    it: torch 2.11's refuses the window by which `varlen_attn` says causal, and others take two
    results of a forward pass that has five.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    warnings.filterwarnings(
        "ignore", message="Argument aux_data"
    )  # of its compiler, on its own code

    def forward(
        query: Tensor, key: Tensor, value: Tensor, *settings: Any, **options: Any
    ) -> tuple[Tensor, ...]:
        output, lse, *_ = _flash_attn_fwd(
            query, key, value, **_flash_arguments(*settings, **options), return_lse=True
        )
        return (
            output,
            lse,
            *[query.new_empty(0)] * 3,
        )  # torch's state of the dropout, of which there is none

    def backward(grad: Tensor, *given: Any, **options: Any) -> tuple[Tensor, ...]:
        query, key, value, output, lse, *settings = given
        told = _flash_arguments(*settings, **options) | {
            "deterministic": torch.are_deterministic_algorithms_enabled()
        }
        return _flash_attn_bwd(query, key, value, output, grad, lse, **told)

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
    """Arguments of torch's operators by the package's names; torch says -1 for a window without end."""
    bounds = {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
    }
    left, right = (None if size == -1 else size for size in (window_size_left, window_size_right))
    return bounds | {
        "window_size_left": left,
        "window_size_right": right,
        "causal": causal,
        "softmax_scale": scale,
    }
