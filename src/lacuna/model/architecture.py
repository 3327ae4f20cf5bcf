"""What lacuna must know of a Hugging Face causal LM: its configuration, layers, head and sizes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
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
from lacuna.data.remote_code import open_with
from lacuna.data.unpacked import hf_folder
from lacuna.model.kind import new_model, without_first_values
from lacuna.parallel.precision import keep_in_float32

# What transformers may raise where it cannot make a model of a configuration.
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
# What they call the number of experts of a layer, and of those that a token visits.
_EXPERTS = ("num_local_experts", "num_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


@contextmanager
def _refusals_explained(problem: str) -> Iterator[None]:
    """Turns what transformers raises against a configuration into a `UserError` with a problem."""
    try:
        yield
    except _REJECTIONS as error:
        reason = shorten(str(error), 400) or "no reason is given"
        kind = type(error).__name__
        raise UserError(f"{problem}: {reason} ({kind}); mend the configuration") from error


def load_model_config(
    settings: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> PretrainedConfig:
    """Reads the Hugging Face configuration of the run's model.

    Its vocabulary is enlarged until it holds every token. Raises `UserError` when the configuration
    cannot be read, or is that of no causal LM.
    """
    source = str(settings.name_or_path or settings.config)
    setting = "model.name_or_path" if settings.name_or_path else "model.config"
    mend = "there is no such file or folder here, and the Hub gave none"
    if os.path.exists(source):
        mend = "check it"
    problem = f"{setting}: cannot read a model configuration from {source!r}"
    with _refusals_explained(problem), explained(problem, OSError, ValueError, KeyError, mend=mend):
        model_config: PretrainedConfig = open_with(
            AutoConfig, hf_folder(source), settings.trust_remote_code
        )
    text_config = model_config.get_text_config()
    # A few models of text and pictures have a language model that is none of the causal ones.
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
    model_config.architectures = None  # the task decides what is made of it
    if settings.output_router_logits is not None or settings.router_aux_loss_coef is not None:
        from lacuna.model.router_settings import set_router_loss

        set_router_loss(settings, model_config)
    return model_config


def _grow_vocabulary(
    text_config: PretrainedConfig, settings: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Enlarges a configuration's vocabulary, in place, until it holds every token.

    Raises `UserError` where the tokenizer has tokens that weights to be loaded have no rows for.
    """
    tokens = len(tokenizer)
    known = text_config.vocab_size
    if settings.name_or_path and tokens > known and not settings.new_tokens:
        raise UserError(
            f"model.tokenizer_path: the tokenizer has {tokens} tokens, the model at "
            f"model.name_or_path only {known}: use the tokenizer that belongs to the model."
        )
    # New tokens may have ids above the number of tokens, since some tokenizers leave ids out.
    ids = cast(list[int], tokenizer.convert_tokens_to_ids([*settings.new_tokens]))
    highest = max(ids, default=0)
    multiple = settings.vocabulary_multiple
    rows = -(-max(tokens, highest + 1, known) // multiple) * multiple
    text_config.vocab_size = rows
    if rows > known:
        logger.warning(
            "the model's vocabulary is enlarged from %d to %d rows: the tokenizer has %d tokens, "
            "model.vocabulary_multiple is %d",
            known,
            rows,
            tokens,
            multiple,
        )


def causal_class(model_config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of causal language models that transformers has for a configuration."""
    return cast(type[PreTrainedModel], AutoModelForCausalLM._model_mapping[type(model_config)])


def is_from_fla(model_config: PretrainedConfig) -> bool:
    """Whether a model is one of flash-linear-attention's, for which there is an extension."""
    return type(model_config).__module__.startswith("fla.")


def meta_model(
    model_config: PretrainedConfig, attention: str | None, dtype: torch.dtype
) -> PreTrainedModel:
    """Makes a model that has shapes but no memory.

    The attention and the dtype are noted in its configuration. Tensors that transformers keeps in
    float32 are float32 whatever the others are.
    """
    rejected = (
        "model: transformers makes none of this configuration of a "
        f"{model_config.model_type!r} model"
    )
    empty = without_first_values()
    with torch.device("meta"), no_init_weights(), empty, _refusals_explained(rejected):
        model = new_model(model_config, dtype, attention)
    model.train()
    model.tie_weights()  # as initialisation does
    keep_in_float32(model, dtype)
    return model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, wherever the architecture keeps it.

    Raises `UserError` where there is none.
    """
    count = model.config.get_text_config().num_hidden_layers
    # The decoder is searched first: an encoder of pictures or sounds may have as many layers.
    # GIT has its encoder of pictures inside what it calls its decoder.
    for module in (*model.get_decoder().modules(), *model.modules()):
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and "Vision" not in type(module[0]).__name__
        ):
            return module
    raise UserError(
        f"model: {type(model).__name__} has no list of {count} decoder layers, so it cannot be "
        "sharded."
    )


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model by name, not copied, and tied ones once."""
    tied = model.all_tied_weights_keys
    return {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in tied
    }


def vocabulary_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The weights that have a row for every token, by all their names.

    These are the embedding, the head and its bias.
    """
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    found = {*nn.ModuleList(filter(None, ends)).parameters()}
    return {
        name: weight
        for name, weight in model.named_parameters(remove_duplicate=False)
        if weight in found
    }


def non_embedding_parameters(model: PreTrainedModel) -> int:
    """The number of parameters that a token is multiplied with: all but those of embeddings.

    The head counts even when it is tied to the embedding. Of the weights of a mixture of experts
    only the share of the experts that a token visits counts.
    """
    experts, chosen = experts_of(model.config)
    share = chosen / experts if experts and chosen else 1.0
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model.get_output_embeddings(), "weight", None)
    left_out = {id(module.weight) for module in embeddings} - {id(head)}
    count = 0.0
    for name, weight in model.named_parameters():
        if id(weight) in left_out:
            continue
        is_stack = weight.ndim == 3 and len(weight) == experts and "shared" not in name
        if is_stack or ".experts." in name:
            count += weight.numel() * share
        else:
            count += weight.numel()
    return int(count)


def experts_of(model_config: PretrainedConfig) -> tuple[int, int]:
    """The number of experts of a layer, and of those that a token visits; 0 where it has none."""
    text_config = model_config.get_text_config()
    table = getattr(text_config, "ffn_config", text_config)  # DBRX has a table of its own
    experts, chosen = (
        next(filter(None, (getattr(table, name, None) for name in names)), 0)
        for names in (_EXPERTS, _CHOSEN)
    )
    return experts, chosen


def layer_settings(text_config: PretrainedConfig) -> list[PretrainedConfig]:
    """The configuration of each layer, since in some models the layers differ."""
    if text_config.is_heterogeneous:
        return [*text_config.per_layer_config]
    return [text_config] * text_config.num_hidden_layers


def attention_heads(layer: PretrainedConfig) -> int:
    """The number of query heads of a layer: 0 where nothing attends (Mamba)."""
    return getattr(layer, "num_attention_heads", 0)


def head_dim(layer: PretrainedConfig) -> int:
    """The width of an attention head of a layer."""
    given: int | None = getattr(layer, "head_dim", None)
    width: int = layer.hidden_size
    return given or width // max(attention_heads(layer), 1)


def is_soft_capped(model_config: PretrainedConfig) -> bool:
    """Whether attention scores are capped softly, which only eager attention and ours know of."""
    text_config = model_config.get_text_config()
    return getattr(text_config, "attn_logit_softcapping", None) is not None


def asks_for_router_loss(model_config: PretrainedConfig) -> bool:
    """Whether a configuration asks for the load-balancing loss of its routers."""
    text_config = model_config.get_text_config()
    asked = getattr(text_config, "output_router_logits", False)
    return asked and any(getattr(text_config, name, None) for name in ROUTER_COEFFICIENTS)
