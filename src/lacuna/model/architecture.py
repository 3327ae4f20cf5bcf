"""What lacuna needs to know of any Hugging Face causal LM: its configuration, layers, head and sizes."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from lacuna.config import Config, UserError, explained, logger
from lacuna.data.remote_code import open_with
from lacuna.data.unpacked import hf_folder
from lacuna.model.router import set_router_loss
from lacuna.parallel.precision import keep_in_float32

# What transformers raises of a configuration that it cannot make a model of.
_REJECTIONS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


@contextmanager
def _accepted(problem: str) -> Iterator[None]:
    """Within it, what transformers says against a model's configuration becomes a `UserError` about it."""
    try:
        yield
    except _REJECTIONS as error:
        reason = shorten(str(error), 400) or "no reason is given"
        raise UserError(
            f"{problem}: {reason} ({type(error).__name__}); mend the configuration"
        ) from error


def load_model_config(config: Config, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The Hugging Face configuration of the run's model, with a vocabulary that holds every token.

    Raises `UserError` when it cannot be read, or is no causal LM.
    """
    source = config.model.name_or_path or config.model.config
    setting = "model.name_or_path" if config.model.name_or_path else "model.config"
    mend = (
        "check it"
        if os.path.exists(str(source))
        else "there is no such file or folder here, and the Hub gave none"
    )
    problem = f"{setting}: cannot read a model configuration from {source!r}"
    with _accepted(problem), explained(problem, OSError, ValueError, KeyError, mend=mend):
        model_config = open_with(AutoConfig, hf_folder(str(source)), config.model.trust_remote_code)
    # Of a few with pictures transformers makes a language model that is none of its causal ones.
    kinds = {type(model_config), type(model_config.get_text_config())}
    if any(kind not in AutoModelForCausalLM._model_mapping for kind in kinds):
        raise UserError(
            f"{setting}: {source!r} is a {model_config.model_type!r} model, which is no causal LM."
        )
    text_config = model_config.get_text_config()
    if not hasattr(text_config, "num_hidden_layers"):
        raise UserError(
            f"{setting}: {source!r} is a {model_config.model_type!r} model, which has no single list of decoder "
            "layers (no num_hidden_layers in its configuration): choose another model."
        )
    tokens, known, multiple = (
        len(tokenizer),
        text_config.vocab_size,
        config.model.vocabulary_multiple,
    )
    if config.model.name_or_path and tokens > known and not config.model.new_tokens:
        both = f"the tokenizer has {tokens} tokens, the model at model.name_or_path only {known}"
        raise UserError(
            f"model.tokenizer_path: {both}: use the tokenizer that belongs to the model."
        )
    highest = max(
        tokenizer.convert_tokens_to_ids([*config.model.new_tokens]), default=0
    )  # some leave ids out
    rows = text_config.vocab_size = -(-max(tokens, highest + 1, known) // multiple) * multiple
    if rows > known:
        reasons = f"the tokenizer has {tokens} tokens, model.vocabulary_multiple is {multiple}"
        logger.warning(
            "the model's vocabulary is enlarged from %d to %d rows: %s", known, rows, reasons
        )
    model_config.use_cache = False
    set_router_loss(config, model_config)
    return model_config


def meta_model(
    model_config: PretrainedConfig, attention: str | None, dtype: torch.dtype
) -> PreTrainedModel:
    """The model without memory: shapes only. Attention and dtype are noted in the configuration.

    What transformers keeps in float32 has that dtype whatever the others have.
    """
    rejected = f"model: transformers makes none of this configuration of a {model_config.model_type!r} model"
    with torch.device("meta"), no_init_weights(), _accepted(rejected):
        settings = {"dtype": dtype, "attn_implementation": attention}
        model = AutoModelForCausalLM.from_config(model_config, **settings).train()
    model.tie_weights()  # as initialisation does
    keep_in_float32(model, dtype)
    return model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, wherever the architecture keeps it."""
    count = model.config.get_text_config().num_hidden_layers
    # First in the decoder: what sees or hears may have as many.
    for module in (*model.get_decoder().modules(), *model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"model: {type(model).__name__} has no list of {count} decoder layers, so it cannot be sharded."
    )


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones once, not copied."""
    tied = model.all_tied_weights_keys
    return {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in tied
    }


def vocabulary_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What has a row for every token, embedding and head with its bias, by each of their names."""
    found = {
        *nn.ModuleList(
            filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
        ).parameters()
    }
    return {
        name: weight
        for name, weight in model.named_parameters(remove_duplicate=False)
        if weight in found
    }


def non_embedding_parameters(model: nn.Module) -> int:
    """Parameters in matrix products with every token: all but embeddings, the head counted even when tied.

    Of mixture-of-experts weights only the share of the experts that a token visits counts.
    """
    text_config = model.config.get_text_config()
    experts = getattr(text_config, "num_local_experts", None) or getattr(
        text_config, "num_experts", None
    )
    chosen = getattr(text_config, "num_experts_per_tok", None)
    active = chosen / experts if experts and chosen else 1.0
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    left_out = embeddings - {id(getattr(model.get_output_embeddings(), "weight", None))}
    counted = (
        (name, weight) for name, weight in model.named_parameters() if id(weight) not in left_out
    )
    return int(
        sum(weight.numel() * (active if ".experts." in name else 1) for name, weight in counted)
    )


def layer_settings(text_config: PretrainedConfig) -> list[PretrainedConfig]:
    """The configuration of each layer: in some models they differ."""
    if text_config.is_heterogeneous:
        return text_config.per_layer_config[:]
    return [text_config] * text_config.num_hidden_layers


def attention_heads(layer: PretrainedConfig) -> int:
    """The query heads of a layer; none where nothing attends (Mamba)."""
    return getattr(layer, "num_attention_heads", 0)


def head_dim(layer: PretrainedConfig) -> int:
    """The width of an attention head of a layer."""
    given = getattr(layer, "head_dim", None)
    return given or layer.hidden_size // max(attention_heads(layer), 1)


def attention_widths(model_config: PretrainedConfig) -> dict[int | None, int]:
    """The width of all query heads of all layers together, by their window in tokens.

    A window of None is all earlier tokens.
    """
    text_config = model_config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)
    widths: Counter[int | None] = Counter()
    for place, layer in enumerate(layer_settings(text_config)):
        window = getattr(layer, "sliding_window", None)
        if not getattr(layer, "use_sliding_window", True):
            window = None
        slides = kinds[place] == "sliding_attention" if kinds else window is not None
        widths[window if slides else None] += attention_heads(layer) * head_dim(layer)
    return dict(widths)


def step_flops(
    parameters: int, widths: dict[int | None, int], tokens: int, lengths: torch.Tensor
) -> float:
    """Model FLOPs, forward and backward, of `tokens` tokens in documents of `lengths` (PaLM, appendix B).

    6 per parameter and token; for attention 12 · heads · head_dim, of `attention_widths`, per layer
    and pair of query and key, of which causal attention computes half the square. Nothing is added
    for recomputation.
    """
    flops, lengths = 6.0 * parameters * tokens, lengths.double()
    for window, width in widths.items():
        seen = lengths.clamp(0, window)
        flops += 12.0 * width * float((lengths * seen - seen * seen / 2).sum())
    return flops


def is_soft_capped(model_config: PretrainedConfig) -> bool:
    """Whether attention scores are capped softly, which only eager attention and ours know of."""
    text_config = model_config.get_text_config()
    return getattr(text_config, "attn_logit_softcapping", None) is not None
