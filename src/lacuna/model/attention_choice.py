"""Which implementation of attention a run may have, and why it cannot have another."""

import torch
from transformers import PretrainedConfig

from lacuna.config import UserError
from lacuna.config.attentions import is_own
from lacuna.model.architecture import causal_class, is_from_fla, is_soft_capped
from lacuna.model.attention import HALF, PACKED
from lacuna.model.over_tokens import has_convolutions
from lacuna.parallel.mesh import Layout


def attention_choices(
    asked: str,
    apart: bool,
    model_config: PretrainedConfig,
    device_type: str,
    dtype: torch.dtype,
    layout: Layout,
) -> tuple[str, ...]:
    """The attentions that a run may have, by transformers' names, the best first.

    They depend on `asked`, which is `model.attention`, on whether documents are kept `apart`, on
    the layout, on the device, and on what the model needs. Which of them computes what the model
    does remains to be tried. Raises `UserError` for an attention that the layout, the device, the
    dtype or the model cannot have.
    """
    if is_from_fla(model_config):
        from lacuna.model.linear_attention import bounds_choices

        return bounds_choices(asked, model_config, device_type, layout)
    if is_own(asked) or is_own(model_config._attn_implementation):
        from lacuna.model.own_attention_choice import own_choices  # an extension

        return own_choices(asked, apart, model_config, layout)
    shared = layout.sharing > 1
    model_class = causal_class(model_config)
    # Hybrids do not say so, but theirs can be exchanged; whether it was is tried.
    exchangeable = model_class._supports_attention_backend or has_convolutions(model_config)
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
        return (PACKED,)  # only our own attention knows which part of the documents a rank has
    if asked != "auto":
        return (asked,)
    # All but eager would silently leave a soft cap out.
    plain = model_class._supports_sdpa and not is_soft_capped(model_config)
    own = ("sdpa", "eager") if plain else ("eager",)
    if not exchangeable:
        return own
    fast = device_type == "cuda" and dtype in HALF and not has_dropout(model_config)
    if fast and plain and apart:
        return (PACKED, *own)
    return (*own, PACKED)


def _reason_against(
    asked: str,
    model_config: PretrainedConfig,
    device_type: str,
    dtype: torch.dtype,
    shared: bool,
) -> str | None:
    """Why the attention that is asked for cannot be had and what to do, or None if it can."""
    flash = asked in ("varlen", "flash_attention_2", "flash_attention_3")
    if flash and device_type != "cuda":
        return 'needs a GPU; this run is on the CPU: use "auto" or "sdpa"'
    if flash and dtype not in HALF:
        return 'has half precision only: drop training.mixed_precision_param, or use "sdpa"'
    if asked == "flex_attention" and device_type != "cuda":
        return 'has no backward pass on a CPU: use "auto" or "sdpa"'
    if asked == "varlen" and has_dropout(model_config):
        return 'has no dropout, and the model has: set it to 0, or use "sdpa"'
    if asked in ("sdpa", "varlen") and not shared and is_soft_capped(model_config):
        return 'would leave out the model\'s soft cap: use "auto" or "eager"'
    if shared and asked not in ("auto", "varlen"):
        return (
            "needs whole sequences, which tensor, context and pipeline parallelism share out: use "
            '"auto"'
        )
    return None


def has_dropout(model_config: PretrainedConfig) -> bool:
    """Whether a model drops out some of the attention weights."""
    text_config = model_config.get_text_config()
    return any(getattr(text_config, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))
