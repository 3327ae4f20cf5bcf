"""What lacuna needs to know of any Hugging Face causal LM: configuration, layers, head, sizes."""

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

from lacuna.config import UserError, explained, logger
from lacuna.config.sections import ModelConfig
from lacuna.data.gguf import hf_folder
from lacuna.data.remote_code import open_with
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

# What configurations call the weight of the load-balancing loss of a mixture of experts.
ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


@contextmanager
def _accepted(problem: str) -> Iterator[None]:
    """Within it, what transformers says against a configuration becomes a `UserError` about it."""
    try:
        yield
    except _REJECTIONS as error:
        reason = shorten(str(error), 400) or "no reason is given"
        kind = type(error).__name__
        raise UserError(f"{problem}: {reason} ({kind}); mend the configuration") from error


def load_model_config(
    settings: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> PretrainedConfig:
    """The Hugging Face configuration of the run's model, with a vocabulary that holds every token.

    Raises `UserError` when it cannot be read, or is no causal LM.
    """
    source = str(settings.name_or_path or settings.config)
    setting = "model.name_or_path" if settings.name_or_path else "model.config"
    mend = "there is no such file or folder here, and the Hub gave none"
    if os.path.exists(source):
        mend = "check it"
    problem = f"{setting}: cannot read a model configuration from {source!r}"
    with _accepted(problem), explained(problem, OSError, ValueError, KeyError, mend=mend):
        model_config = open_with(AutoConfig, hf_folder(source), settings.trust_remote_code)
    text_config = model_config.get_text_config()
    # Of a few with pictures transformers makes a language model that is none of its causal ones.
    kinds = {type(model_config), type(text_config)}
    kind = f"{setting}: {source!r} is a {model_config.model_type!r} model"
    if any(one not in AutoModelForCausalLM._model_mapping for one in kinds):
        raise UserError(f"{kind}, which is no causal LM.")
    if not hasattr(text_config, "num_hidden_layers"):
        raise UserError(
            f"{kind}, which has no single list of decoder layers (no num_hidden_layers in its "
            "configuration): choose another model."
        )
    _grow_vocabulary(text_config, settings, tokenizer)
    model_config.use_cache = False
    if settings.output_router_logits is not None or settings.router_aux_loss_coef is not None:
        from lacuna.model.router import set_router_loss

        set_router_loss(settings, model_config)
    return model_config


def _grow_vocabulary(
    text_config: PretrainedConfig, settings: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Gives a configuration, in place, a vocabulary that holds every token."""
    tokens = len(tokenizer)
    known = text_config.vocab_size
    if settings.name_or_path and tokens > known and not settings.new_tokens:
        raise UserError(
            f"model.tokenizer_path: the tokenizer has {tokens} tokens, the model at "
            f"model.name_or_path only {known}: use the tokenizer that belongs to the model."
        )
    # Higher than their number may be the new ones' ids: some tokenizers leave ids out.
    highest = max(tokenizer.convert_tokens_to_ids([*settings.new_tokens]), default=0)
    multiple = settings.vocabulary_multiple
    rows = -(-max(tokens, highest + 1, known) // multiple) * multiple
    text_config.vocab_size = rows
    if rows > known:
        logger.warning(
            "the model's vocabulary is enlarged from %d to %d rows: the tokenizer has %d tokens, "
            "model.vocabulary_multiple is %d",
            *(known, rows, tokens, multiple),
        )


def meta_model(
    model_config: PretrainedConfig, attention: str | None, dtype: torch.dtype
) -> PreTrainedModel:
    """The model without memory: shapes only. Attention and dtype are noted in the configuration.

    What transformers keeps in float32 has that dtype whatever the others have.
    """
    rejected = (
        "model: transformers makes none of this configuration of a "
        f"{model_config.model_type!r} model"
    )
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
        f"model: {type(model).__name__} has no list of {count} decoder layers, so it cannot be "
        "sharded."
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
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    found = {*nn.ModuleList(filter(None, ends)).parameters()}
    return {
        name: weight
        for name, weight in model.named_parameters(remove_duplicate=False)
        if weight in found
    }


def non_embedding_parameters(model: PreTrainedModel) -> int:
    """Parameters in matrix products with every token: all but embeddings.

    The head counts even when it is tied. Of mixture-of-experts weights only the share of the
    experts that a token visits counts.
    """
    text_config = model.config.get_text_config()
    names = ("num_local_experts", "num_experts")
    experts = next(filter(None, (getattr(text_config, name, None) for name in names)), None)
    chosen = getattr(text_config, "num_experts_per_tok", None)
    active = chosen / experts if experts and chosen else 1.0
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model.get_output_embeddings(), "weight", None)
    left_out = {id(module.weight) for module in embeddings} - {id(head)}
    count = 0.0
    for name, weight in model.named_parameters():
        if id(weight) not in left_out:
            count += weight.numel() * (active if ".experts." in name else 1)
    return int(count)


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
    flops = 6.0 * parameters * tokens
    lengths = lengths.double()
    for window, width in widths.items():
        seen = lengths.clamp(0, window)
        flops += 12.0 * width * float((lengths * seen - seen * seen / 2).sum())
    return flops


def is_soft_capped(model_config: PretrainedConfig) -> bool:
    """Whether attention scores are capped softly, which only eager attention and ours know of."""
    text_config = model_config.get_text_config()
    return getattr(text_config, "attn_logit_softcapping", None) is not None


def asks_for_router_loss(model_config: PretrainedConfig) -> bool:
    """Whether a configuration asks for the load-balancing loss of its routers."""
    text_config = model_config.get_text_config()
    asked = getattr(text_config, "output_router_logits", False)
    return asked and any(getattr(text_config, name, None) for name in ROUTER_COEFFICIENTS)
