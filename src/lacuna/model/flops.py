"""The FLOPs that training takes by a model's sizes: of weights, attention and other states."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config.attentions import TRAINED
from lacuna.model.architecture import (
    attention_heads,
    decoder_layers,
    head_dim,
    is_from_fla,
    layer_settings,
    non_embedding_parameters,
)

# Kinds of layers, as transformers calls them, in which nothing attends.
_LINEAR = ("linear_attention", "mamba")
_WITHOUT_ATTENTION = ("conv", "mlp", "moe", *_LINEAR)
# Those with both attention and a state.
_HYBRID = ("hybrid", "hybrid_sliding")


def attention_widths(model_config: PretrainedConfig) -> dict[int | None, int]:
    """The summed width of the query heads of all layers, by the layers' window in tokens.

    A window of None reaches all earlier tokens. Layers without attention have none.
    """
    text_config = model_config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)
    widths: Counter[int | None] = Counter()
    for place, layer in enumerate(layer_settings(text_config)):
        if kinds and kinds[place] in _WITHOUT_ATTENTION:
            continue
        window = getattr(layer, "sliding_window", None)
        if not getattr(layer, "use_sliding_window", True):
            window = None
        slides = kinds[place] == "sliding_attention" if kinds else window is not None
        widths[window if slides else None] += attention_heads(layer) * head_dim(layer)
    return dict(widths)


def step_flops(
    parameters: int, widths: dict[int | None, int], tokens: int, lengths: Tensor
) -> float:
    """The model FLOPs, forward and backward, of `tokens` tokens in documents of `lengths`.

    They are counted as in PaLM, appendix B: 6 for each token and each parameter, or value of a
    state, that it is multiplied by, and for attention 12 · heads · head_dim (of `attention_widths`)
    for each layer and each pair of query and key. Of these pairs causal attention computes half the
    square. Recomputation adds nothing. Logits of tokens that are not trained count, made or not.
    """
    flops = 6.0 * parameters * tokens
    lengths = lengths.double()
    for window, width in widths.items():
        seen = lengths.clamp(0, window)
        flops += 12.0 * width * float((lengths * seen - seen * seen / 2).sum())
    return flops


def flops_of(model: PreTrainedModel) -> Callable[[int, Tensor], float]:
    """Gives a whole model's FLOPs of a number of tokens in documents of these lengths."""
    if is_from_fla(model.config):
        from lacuna.model.linear_attention import products_and_widths  # an extension

        return partial(step_flops, *products_and_widths(model))
    widths = attention_widths(model.config)
    if model.config._attn_implementation.startswith(TRAINED):
        from lacuna.model.own_attention_choice import scaled_widths  # an extension

        widths = scaled_widths(model.config, widths)
    products = non_embedding_parameters(model)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if {*kinds} & {*_LINEAR, *_HYBRID}:
        from lacuna.model.recurrent_flops import state_products  # an extension

        products += state_products(decoder_layers(model))
    return partial(step_flops, products, widths)
