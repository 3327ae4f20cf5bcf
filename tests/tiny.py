"""Tiny models of many architectures, and functions run on several gloo ranks."""

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    ModernBertDecoderConfig,
    Olmo2Config,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lacuna.config import Config
from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.model.forward import attach_forward
from lacuna.model.layers.lora import trained_names
from lacuna.model.weights import fill_model
from lacuna.parallel.mesh import Layout, Mesh, build_mesh
from lacuna.parallel.parallelize import compile_enabled, parallelize

Result = TypeVar("Result")
VOCABULARY = 97  # no multiple of any number of ranks
CPU = torch.device("cpu")

_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_PLAIN = {**_TOKENS, **_SIZES, "max_position_embeddings": 64}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_GPT2 = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_ARCHITECTURES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _GROUPED),
    "llama_tied": (LlamaConfig, {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {**_GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma": (GemmaConfig, {**_GROUPED, "head_dim": 16}),
    "gemma2": (Gemma2Config, {**_GROUPED, "head_dim": 16, "sliding_window": 4}),
    "gemma3": (
        Gemma3TextConfig,
        {
            **_GROUPED,
            "head_dim": 16,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mistral": (MistralConfig, {**_GROUPED, "sliding_window": 4}),
    "gpt2": (GPT2Config, {**_GPT2, **_GPT2_DROPOUT}),
    "neox": (GPTNeoXConfig, _PLAIN),
    "cohere": (CohereConfig, {**_GROUPED, "logit_scale": 0.25}),
    "granite": (GraniteConfig, {**_GROUPED, "logits_scaling": 4.0}),
    "phi": (PhiConfig, _PLAIN),
    "opt": (
        OPTConfig,
        {
            **_TOKENS,
            "hidden_size": 32,
            "word_embed_proj_dim": 16,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.0,
        },
    ),
    "falcon": (FalconConfig, _PLAIN),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **_GROUPED,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "mamba": (MambaConfig, {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "jamba": (JambaConfig, {**_GROUPED, "use_mamba_kernels": False}),
    "modernbert": (ModernBertDecoderConfig, {**_PLAIN, "layer_types": ["full_attention"] * 2}),
    "bloom": (BloomConfig, {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "olmo2": (Olmo2Config, _GROUPED),
    "qwen3_moe": (Qwen3MoeConfig, {**_GROUPED, **_EXPERTS, "head_dim": 16}),
    "gpt_oss": (
        GptOssConfig,
        {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (Qwen2MoeConfig, {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 24}),
}


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """A small configuration of an architecture, without dropout and without a cache."""
    kind, settings = _ARCHITECTURES[name]
    model_config = kind(**{**settings, **changes})
    model_config.use_cache = False
    return model_config


def random_model(
    model_config: PretrainedConfig, attention: str = "sdpa", seed: int = 0
) -> PreTrainedModel:
    """Returns transformers' own unsharded model in evaluation mode.

    Every parameter is random, norms and biases too.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        model_config, dtype=torch.float32, attn_implementation=attention
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def own_loss(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, labels: Tensor, **extra: Any
) -> Tensor:
    """The summed loss by torch's cross-entropy from the model's own logits."""
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **extra).logits
    return F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    """A tokenizer with `VOCABULARY` tokens: `w4` is token 4, `w5` token 5 and so on."""
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words = {f"w{number}": number for number in range(len(special), VOCABULARY)}
    backend = Tokenizer(models.WordLevel(special | words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


@cache
def mesh_of(layout: Layout) -> Mesh:
    """The mesh of a layout. A process makes it once, because each mesh has threads of its own."""
    return build_mesh(layout, "cpu")


def sharded_model(
    model_config: PretrainedConfig,
    settings: Config,
    replicate: int = 1,
    attention: str | None = "sdpa",
) -> PreTrainedModel:
    """The model that lacuna makes of a configuration, over all ranks.

    It is loaded or initialised as `settings` say.
    """
    model = meta_model(model_config, attention, torch.float32)
    mesh = mesh_of(Layout(replicate, dist.get_world_size() // replicate))
    parallelize(
        model,
        decoder_layers(model),
        mesh,
        settings.parallelism,
        settings.activation_checkpoint,
        "layers" if compile_enabled(settings.compile, settings.parallelism, "cpu") else "nothing",
        settings.training,
        settings.quantization,
    )
    trained = trained_names(model)
    fill_model(model, trained, settings.model, settings.lora, settings.training, CPU, fill=True)
    attach_forward(model)
    return model


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor from all ranks; all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The names that only one of two sets has, or whose tensors are not equal bit for bit."""
    both = left.keys() & right.keys()
    return sorted(left.keys() ^ right.keys()) + sorted(
        name for name in both if not torch.equal(left[name], right[name])
    )


def relative_error(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The norm of the difference of two sets of tensors, relative to the norm of the second."""
    assert left.keys() == right.keys()
    difference = torch.cat(
        [(left[name].double() - right[name].double()).flatten() for name in right]
    )
    return (
        difference.norm()
        / torch.cat([tensor.double().flatten() for tensor in right.values()]).norm()
    ).item()


def compiled_by(backend: str) -> AbstractContextManager[object]:
    """Lets a backend of torch compile whatever is compiled meanwhile.

    What is traced, and where a graph ends, is the same for each of them: "aot_eager" shows it in a
    fraction of the time in which "inductor" makes code.
    """
    return mock.patch.object(torch, "compile", partial(torch.compile, backend=backend))


def run_ranks(ranks: int, function: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Calls `function(*arguments)` in each of `ranks` new processes that form a gloo group.

    Returns what each of them returned; an error of one is raised here. The function must belong to
    a module.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _run_rank, (ranks, folder, function, arguments), nprocs=ranks, start_method="forkserver"
        )
        return [
            torch.load(os.path.join(folder, str(rank)), weights_only=False) for rank in range(ranks)
        ]


def _run_rank(
    rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    # If one fails, the others wait no longer than that.
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=3)
    )
    result = function(*arguments)
    torch.save(result, os.path.join(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()
