"""What lacuna needs to know of any Hugging Face causal LM: its configuration, layers, head and sizes."""

import os
from collections import Counter

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import Config, UserError, explained
from lacuna.data.gguf import hf_folder


def load_model_config(config: Config, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The Hugging Face configuration of the run's model, with a vocabulary that holds every token.

    Raises `UserError` when it cannot be read, or is no causal LM.
    """
    source = config.model.name_or_path or config.model.config
    setting = "model.name_or_path" if config.model.name_or_path else "model.config"
    mend = "check it" if os.path.exists(str(source)) else "there is no such file or folder here, and the Hub gave none"
    problem = f"{setting}: cannot read a model configuration from {source!r}"
    with explained(problem, OSError, ValueError, KeyError, mend=mend):
        model_config = AutoConfig.from_pretrained(hf_folder(str(source)))
    if type(model_config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"{setting}: {source!r} is a {model_config.model_type!r} model, which is no causal LM.")
    text_config = model_config.get_text_config()
    tokens, known, multiple = len(tokenizer), text_config.vocab_size, config.model.vocabulary_multiple
    if config.model.name_or_path and tokens > known and not config.model.new_tokens:
        both = f"the tokenizer has {tokens} tokens, the model at model.name_or_path only {known}"
        raise UserError(f"model.tokenizer_path: {both}: use the tokenizer that belongs to the model.")
    highest = max(tokenizer.convert_tokens_to_ids([*config.model.new_tokens]), default=0)  # some leave ids out
    text_config.vocab_size = -(-max(tokens, highest + 1, known) // multiple) * multiple
    model_config.use_cache = False
    return model_config


def meta_model(model_config: PretrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory: shapes only. Attention and dtype are noted in the configuration."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=attention).train()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, wherever the architecture keeps it."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"model: {type(model).__name__} has no list of {count} decoder layers, so it cannot be sharded.")


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones once, not copied."""
    tied = model.all_tied_weights_keys
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}


def vocabulary_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What has a row for every token, embedding and head with its bias, by each of their names."""
    found = {*nn.ModuleList(filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))).parameters()}
    return {name: weight for name, weight in model.named_parameters(remove_duplicate=False) if weight in found}


def non_embedding_parameters(model: nn.Module) -> int:
    """Parameters in matrix products with every token: all but embeddings, the head counted even when tied.

    Of mixture-of-experts weights only the share of the experts that a token visits counts.
    """
    text_config = model.config.get_text_config()
    experts = getattr(text_config, "num_local_experts", None) or getattr(text_config, "num_experts", None)
    chosen = getattr(text_config, "num_experts_per_tok", None)
    active = chosen / experts if experts and chosen else 1.0
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    left_out = embeddings - {id(getattr(model.get_output_embeddings(), "weight", None))}
    counted = ((name, weight) for name, weight in model.named_parameters() if id(weight) not in left_out)
    return int(sum(weight.numel() * (active if ".experts." in name else 1) for name, weight in counted))


def attention_heads(text_config: PretrainedConfig) -> int:
    """The query heads of a layer; none where nothing attends (Mamba)."""
    return getattr(text_config, "num_attention_heads", 0)


def head_dim(text_config: PretrainedConfig) -> int:
    """The width of an attention head."""
    return getattr(text_config, "head_dim", None) or text_config.hidden_size // max(attention_heads(text_config), 1)


def attention_widths(model_config: PretrainedConfig) -> dict[int | None, int]:
    """By their window in tokens (None: all earlier tokens), the width of all query heads of all layers together."""
    text_config = model_config.get_text_config()
    count = text_config.num_hidden_layers
    window = getattr(text_config, "sliding_window", None) if getattr(text_config, "use_sliding_window", True) else None
    kinds = getattr(text_config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
    layers = Counter(window if kind == "sliding_attention" else None for kind in kinds)
    return {window: count * attention_heads(text_config) * head_dim(text_config) for window, count in layers.items()}


def step_flops(parameters: int, widths: dict[int | None, int], tokens: int, lengths: torch.Tensor) -> float:
    """Model FLOPs, forward and backward, of `tokens` tokens in documents of `lengths` (PaLM, appendix B).

    6 per parameter and token; for attention 12 · heads · head_dim, of `attention_widths`, per layer and pair of query
    and key, of which causal attention computes half the square. Nothing is added for recomputation.
    """
    flops, lengths = 6.0 * parameters * tokens, lengths.double()
    for window, width in widths.items():
        seen = lengths.clamp(0, window)
        flops += 12.0 * width * float((lengths * seen - seen * seen / 2).sum())
    return flops
