"""Attention that keeps packed documents apart: which implementation, and the one of ours for GPUs."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from lacuna.config import Config, UserError

VARLEN = "lacuna_varlen"


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, by torch's `varlen_attn` (FlashAttention), for transformers' interface.

    `query` [B, heads, T, D], `key` and `value` [B, key_value_heads, T, D]; `cu_seq_lens_q` int32 [documents + 1]
    bounds the documents in the flattened B·T order. Returns [B, T, heads, D]. Half precision only.
    """
    from torch.nn.attention.varlen import varlen_attn

    assert cu_seq_lens_q is not None and max_length_q is not None, f"{type(module).__name__} dropped cu_seq_lens_q"
    assert dropout == 0.0, "varlen attention has no dropout"
    batch, heads, length, width = query.shape

    def flat(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).reshape(batch * length, tensor.shape[1], width)

    grouped = {"enable_gqa": True} if _TAKES_GQA and key.shape[1] != heads else {}
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    output = varlen_attn(
        flat(query), flat(key), flat(value), cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
        scale=scaling, window_size=window, **grouped,
    )  # fmt: skip
    return output.view(batch, length, heads, width), None


def _varlen_parameters() -> set[str]:
    from torch.nn.attention.varlen import varlen_attn

    return set(inspect.signature(varlen_attn).parameters)


# torch 2.11 takes grouped heads without being told; later versions want the argument.
_TAKES_GQA = "enable_gqa" in _varlen_parameters()
AttentionInterface.register(VARLEN, varlen_attention)


def choose_attention(config: Config, model_config: PretrainedConfig, device_type: str, dtype: torch.dtype) -> str:
    """transformers' name of the attention to use, by `model.attention`, the device, and what the model needs.

    Raises `UserError` for an implementation that the device, the dtype or the model cannot have.
    """
    asked = config.model.attention
    text_config = model_config.get_text_config()
    soft_capped = getattr(text_config, "attn_logit_softcapping", None) is not None
    dropout = any(getattr(text_config, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))
    half = dtype in (torch.bfloat16, torch.float16)
    if asked == "auto":
        model_class = AutoModelForCausalLM._model_mapping[type(model_config)]
        if soft_capped or not model_class._supports_sdpa:
            return "eager"  # the others would silently leave a soft cap out
        exchangeable = getattr(model_class, "_supports_attention_backend", False)
        if device_type == "cuda" and half and config.data.document_mask and exchangeable and not dropout:
            return VARLEN
        return "sdpa"
    if asked in ("varlen", "flash_attention_2", "flash_attention_3"):
        if device_type != "cuda":
            raise UserError(f'model.attention: "{asked}" needs a GPU; this run is on the CPU: use "auto" or "sdpa".')
        if not half:
            raise UserError(
                f'model.attention: "{asked}" computes in half precision only, and training.mixed_precision_param '
                f'is "float32": use bfloat16, or model.attention = "sdpa".'
            )
    if asked == "flex_attention" and device_type != "cuda":
        raise UserError('model.attention: "flex_attention" has no backward pass on a CPU: use "auto" or "sdpa".')
    if asked == "varlen" and dropout:
        raise UserError('model.attention: "varlen" has no dropout, and the model has: set it to 0, or use "sdpa".')
    if soft_capped and asked in ("sdpa", "varlen"):
        raise UserError(f'model.attention: "{asked}" would leave out the model\'s soft cap: use "auto" or "eager".')
    return VARLEN if asked == "varlen" else asked
