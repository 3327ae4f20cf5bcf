"""Small configurations of every causal language model of the installed transformers."""

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

VOCABULARY = 97
LAYERS = 4
# Their configurations in small fit no small model with a list of layers.
NO_SPECIMEN = {"blt", "hrm_text", "longcat_flash", "xlm"}

# Values that make a model small, by the field of whatever configuration has it.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "use_cache": False,
    # width
    "hidden_size": 32,
    "hidden_size_global": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "embedding_dim": 32,
    "embedding_size": 32,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "input_embedding_size": 32,
    "output_embedding_size": 32,
    "attention_hidden_size": 32,
    "lru_width": 32,
    "router_hidden_size": 16,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "dim_ff": 48,
    "dff": 48,
    "d_inner": 48,
    "feed_forward_size": 48,
    "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "intermediate_size_mlp": 48,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 24,
    # depth
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "decoder_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_encoder_layers": LAYERS,
    "num_blocks": LAYERS,
    "max_window_layers": 2,
    "num_kv_shared_layers": 2,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_head": 8,
    "dim_head": 8,
    "d_kv": 8,
    "kv_channels": 8,
    "rotary_dim": 4,
    "query_pre_attn_scalar": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
    "attention_head_dim": 16,
    "attention_head_size": 8,
    "num_query_groups": 2,
    # low-rank attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "o_lora_rank": 8,
    "o_groups": 2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_experts_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_end_index": 3,
    # states
    "state_size": 4,
    "mamba_d_state": 4,
    "ssm_state_size": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_d_ssm": 32,
    "n_mamba_heads": 2,
    "mamba_headdim": 16,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "block_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    # lengths, such that documents of the tests reach beyond windows
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "max_target_positions": 64,
    "max_source_positions": 64,
    "context_length": 64,
    "model_max_length": 64,
    "sliding_window": 4,
    "sliding_window_size": 4,
    "attention_window_size": 4,
    "window_size": 4,
    "local_attention": 8,
    "attention_chunk_size": 6,
    "floor_scale": 6,
    "log_scaling_n_floor": 6,
    "keep_window_size": 4,
    "index_topk": 4,
    "original_max_position_embeddings": 8,
    # other
    "laurel_rank": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "prompt_length": 4,
    "conv_L_cache": 3,
    "d_rel": 4,
    "rel_extent": 8,
    "unpadded_vocab_size": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "block_multiple_of": 16,
    "adapter_rank": 4,
    "gated_norm_rank": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 8,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64,
    "num_layers_per_stack": 2,
    "pronunciation_vocab_size": 10,
    "pronunciation_embed_dim": 8,
    "shape_vocab_size": 10,
    "shape_embed_dim": 8,
    "num_mel_bins": 8,
    "image_token_id": 90,
    "video_token_id": 91,
    "audio_token_id": 92,
    "image_token_index": 90,
    "boi_token_id": 93,
    "eoi_token_id": 94,
    "boa_token_id": 95,
    "eoa_token_id": 96,
    "boi_token_index": 93,
    "eoi_token_index": 94,
    "eoa_token_index": 95,
    "vision_start_token_id": 93,
    "vision_end_token_id": 94,
}


# Of fields that list something for every layer, an entry of each kind is kept.
_BY_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "no_rope_layers",
    "layer_rope_theta",
    "indexer_types",
    "block_types",
    "attention_layers",
    "num_attention_heads_per_layer",
    "activation_sparsity_pattern",
)

# What else a kind of configuration wants, for its parts to fit together.
_OF_KIND: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},  # its blocks see later ones
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            },
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "n_routed_experts": 4},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": {}, "head_dim": 16},
    "falcon_h1": {"mamba_n_heads": 4},
    # with its own eps of 1e-6 the last bit of a weight moves the small model's gradients by 1e-4
    "gemma4_text": {"rms_norm_eps": 0.3},
    "gemma4_unified_text": {"rms_norm_eps": 0.3},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 2},
    "mamba2": {"num_heads": 8},
    "phimoe": {"router_jitter_noise": 0.25},  # enough that its draws in training show
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": 1,
        "local_num_chunks_before": 7,
        "lsh_attn_chunk_length": 8,
        "attn_layers": ["local"] * LAYERS,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": {
        "pad_token_id": None
    },  # transformers would zero its row when it loads, tied head and all
    "zamba": {"attention_hidden_size": 64, "num_key_value_heads": 4},
    "zamba2": {"attention_hidden_size": 64, "num_key_value_heads": 4, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3]},
}


INCOMPLETE = {
    "dots3_note": "its configuration has no defaults that fit each other",
    "emu3": "its language model alone is no causal language model of transformers",
    "gemma3n": "its parts for pictures need the package timm",
    "gemma4_assistant": "its configuration has no defaults that fit each other",
    "gemma4_unified_assistant": "it goes by the states of another model",
    "mllama": "its language model alone is no causal language model of transformers",
    "musicgen": "its configuration has no one part for text",
    "musicgen_melody": "its configuration has no one part for text",
}
"""Kinds of configuration of which no causal language model can be made in small, by themselves."""


def model_types() -> list[str]:
    """The kinds of configuration that have a causal language model, without the `INCOMPLETE`."""
    return sorted(
        {kind.model_type for kind in AutoModelForCausalLM._model_mapping} - INCOMPLETE.keys()
    )


def configuration_class(model_type: str) -> type[PretrainedConfig]:
    """The class of a kind of configuration."""
    return next(
        kind for kind in AutoModelForCausalLM._model_mapping if kind.model_type == model_type
    )


def small_config(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    """A small configuration of this kind: `LAYERS` layers, and windows that 8 tokens cross."""
    usual = _usual(kind)
    known = {*inspect.signature(kind.__init__).parameters, *usual}
    for base in kind.__mro__:
        known |= {*getattr(base, "__annotations__", {})}
    settings = {
        name: 0.0 for name, value in usual.items() if "drop" in name and type(value) is float
    }
    settings |= {name: value for name, value in _SMALL.items() if name in known}
    if "kv_lora_rank" in known:  # a head of keys for every head of queries
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    settings |= {
        name: _every_kind(usual[name]) for name in _BY_LAYER if isinstance(usual.get(name), list)
    }
    for name, part in kind.sub_configs.items():
        if part is not AutoConfig:
            settings[name] = small_config(part).to_dict()
        elif name in usual:
            settings[name] = small_config(
                type(AutoConfig.for_model(usual[name]["model_type"]))
            ).to_dict()
    return kind(**(settings | _OF_KIND.get(kind.model_type, {}) | changes))


def _usual(kind: type[PretrainedConfig]) -> dict[str, Any]:
    try:
        return kind().to_dict()
    except ValueError:  # one that has no defaults
        return {}


def _every_kind(entries: Sequence[Any]) -> list[Any]:
    kinds = [entry for place, entry in enumerate(entries) if entry not in entries[:place]]
    return [kinds[place % len(kinds)] for place in range(LAYERS)]
