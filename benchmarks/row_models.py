"""The models of the table of benchmarks, as Hugging Face configurations."""

import json
from importlib.resources import files

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}
LLAMA_1B = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_8B = LLAMA_1B | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
HALF_8B = LLAMA_8B | {"num_hidden_layers": 16}
LLAMA_340M = LLAMA | {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
QWEN3_600M = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
# Qwen3-30B-A3B but for its 48 layers: 0.623 billion parameters in each (57 million of them for a
# token), and 0.622 billion in embeddings and head.
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
# Its layers that fit GPUs of 80 GB with weights, gradients and both moments in float32.
QWEN3_MOE_1 = QWEN3_MOE | {"num_hidden_layers": 4}  # 3.1 billion parameters, 46.5 GiB
QWEN3_MOE_2 = QWEN3_MOE | {"num_hidden_layers": 8}  # 5.6 billion, 41.8 GiB on each of two
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GLA_340M = json.loads(files("lacuna.recipes").joinpath("gla_340m.json").read_text())
TINY = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# For the models that have them, beside `TINY`.
TINY_PARTS = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
