"""Which runs a peer of `lacuna bench --against` can make as they are; others are refused by name.

`lacuna bench` asks before it measures anything.
"""

from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from lacuna.config import Config, UserError
from lacuna.config.attentions import SOFTMAX
from lacuna.parallel.mesh import resolve_layout
from lacuna.parallel.precision import compute_dtype

# Settings that a peer is given as well, or that change nothing of what is measured. Any other must
# have its default.
SHARED = (
    "job.task=sft",
    "job.[!t]*",
    "model.name_or_path=*",
    "model.config=*",
    "model.tokenizer_path=*",
    "model.trust_remote_code=*",
    "data.*",
    "chat.*",
    "packing.*",
    "curriculum.*",
    "lr_scheduler.*",
    "validation.*",
    "metrics.*",
    "profiling.*",
    "comm.*",
    "memory_estimation.*",
    "compile.*",
    "activation_checkpoint.mode=full",
    "checkpoint.[!i]*",
    "checkpoint.interval*",
    "optimizer.name=AdamW",
    "optimizer.lr=*",
    "optimizer.beta[12]=*",
    "optimizer.eps=*",
    "optimizer.weight_decay=*",
    "optimizer.implementation=*",
    "optimizer.state_offload_share=*",  # theirs stays on the GPU
    "parallelism.data_parallel_*",
    "training.[!e]*",
    "training.epochs=*",
)
SHARED_WITH = {
    "transformers": (
        *SHARED,
        *(f"model.attention={name}" for name in SOFTMAX),
        "parallelism.expert_parallel_degree=*",  # it shards experts as everything else
    ),
    "torchtitan": (
        *SHARED,
        "model.attention=sdpa",
        "model.attention=varlen",
        "activation_checkpoint.mode=selective",
        "activation_checkpoint.selective_ac_option=*",
        "activation_checkpoint.offload*",  # what it keeps stays on the GPU
        "float8.enable*",
        "float8.recipe_name=*",
        "float8.filter_fqns=('experts',)",
        "float8.filter_small=*",
        "float8.precompute*",
        "float8.emulate=*",
        "parallelism.context_parallel_*",
        "parallelism.expert_parallel_degree=*",
        "parallelism.fsdp_reshard_after_forward=*",
    ),
    "automodel": (
        *SHARED,
        "model.attention=sdpa",
        "model.attention=varlen",
        "activation_checkpoint.mode=selective",
        "activation_checkpoint.selective_ac_option=*",
        "activation_checkpoint.offload*",
        "lora.rank=*",
        "lora.alpha=*",
    ),
    "fla": (
        *SHARED,
        "activation_checkpoint.mode=selective",  # it keeps everything then
        "activation_checkpoint.selective_ac_option=op",
    ),
}

# What a peer imports, and what pip knows it as. torch brings triton along, but for CPUs.
PACKAGES = {
    "transformers": {"accelerate": "accelerate"},
    "torchtitan": {"torchtitan": "torchtitan==0.2.2", "triton": "triton"},
    "automodel": {"nemo_automodel": "nemo-automodel==0.7.0"},
    "fla": {"fla": "flash-linear-attention==0.6.0"},
}


def require_comparable(config: Config, peer: str, processes: int, device: str) -> None:
    """Raises `UserError` for a run that the peer could not make as it is, or a peer not there."""
    default = Config()
    changed = [
        f"{section}.{name}={value}"
        for section, table in config
        for name, value in table
        if value != getattr(getattr(default, section), name)
    ]
    for setting in changed:
        if not any(fnmatchcase(setting, pattern) for pattern in SHARED_WITH[peer]):
            raise UserError(
                f"bench: --against {peer} has nothing like {setting}: leave out one of the two."
            )
    if str(config.model.name_or_path).endswith(".gguf"):
        raise UserError(f"bench: --against {peer} opens no GGUF file as model.name_or_path.")
    require = {
        "transformers": _require_of_transformers,
        "torchtitan": _require_of_torchtitan,
        "automodel": _require_of_automodel,
        "fla": _require_of_fla,
    }
    require[peer](config, processes, device)
    missing = [package for package in PACKAGES[peer] if not find_spec(package)]
    if missing:
        raise UserError(
            f"bench: --against {peer} needs {' and '.join(missing)}, not installed here: "
            f"pip install {' '.join(PACKAGES[peer].values())}"
        )


def _require_of_transformers(config: Config, processes: int, device: str) -> None:
    is_sharded = resolve_layout(config.parallelism, processes).dp_shard > 1
    if is_sharded and device == "cpu":
        raise UserError(
            "bench: --against transformers shards nothing on CPUs: set "
            f"parallelism.data_parallel_replicate_degree = {processes}."
        )


def _require_of_torchtitan(config: Config, processes: int, device: str) -> None:
    from lacuna.data.tokenizer import load_tokenizer, tokenizer_source
    from lacuna.model.architecture import experts_of, load_model_config
    from lacuna.parallel.parallelize import compile_enabled

    layout = resolve_layout(config.parallelism, processes)
    float8 = config.float8
    compiled = compile_enabled(config.compile, config.parallelism, device)
    wrong = {
        "its attention sees whole rows: set data.document_mask = false, with the same for lacuna": (
            config.data.document_mask
        ),
        "its rows have one length: leave out training.varlen": config.training.varlen,
        "its context parallelism needs GPUs: leave out parallelism.context_parallel_degree": (
            layout.cp > 1 and device == "cpu"
        ),
        "it emulates float8 only without compile.enable: leave out float8.emulate": (
            float8.emulate and compiled
        ),
        "float8.recipe_name=rowwise_with_gw_hp has no filter of small layers there: set "
        "float8.filter_small = false": (
            float8.recipe_name == "rowwise_with_gw_hp" and float8.filter_small
        ),
    }
    tokenizer = load_tokenizer(tokenizer_source(config.model), config.model.trust_remote_code)
    model_config = load_model_config(config.model, tokenizer)
    has_experts = experts_of(model_config)[0] > 0
    wrong['its experts stay in bfloat16: set float8.filter_fqns = ["experts"]'] = (
        has_experts and float8.enable_float8_linear and not float8.filter_fqns
    )
    _refuse_first("torchtitan", wrong)
    require_shape_of_torchtitan(model_config, layout.dp_shard > 1)


def _require_of_automodel(config: Config, processes: int, device: str) -> None:
    computed = str(compute_dtype(config.training, device)).removeprefix("torch.")
    recomputed = config.activation_checkpoint
    is_sharded = resolve_layout(config.parallelism, processes).dp_shard > 1
    wrong = {
        "it shards: leave out parallelism.data_parallel_replicate_degree": (
            processes > 1 and not is_sharded
        ),
        "its attention sees whole rows: set data.document_mask = false, with the same for lacuna": (
            config.data.document_mask
        ),
        "its rows have one length: leave out training.varlen": config.training.varlen,
        "it recomputes all or by operation: set activation_checkpoint.selective_ac_option = op": (
            recomputed.mode == "selective" and recomputed.selective_ac_option.isdecimal()
        ),
        "its adapters change in place what recomputation by operation keeps, and torch raises an "
        "error: set activation_checkpoint.mode = full": (
            recomputed.mode == "selective"
            and recomputed.selective_ac_option == "op"
            and bool(config.lora.rank)
        ),
        f"in one process it casts nothing to {computed}: use several, or adapters, or set "
        f"training.dtype = {computed}": (
            processes == 1 and not config.lora.rank and config.training.dtype != computed
        ),
    }
    _refuse_first("automodel", wrong)


def _require_of_fla(config: Config, processes: int, device: str) -> None:
    from lacuna.data.tokenizer import load_tokenizer, tokenizer_source
    from lacuna.model.architecture import is_from_fla, load_model_config

    tokenizer = load_tokenizer(tokenizer_source(config.model), config.model.trust_remote_code)
    model = load_model_config(config.model, tokenizer)
    wrong = {
        f"{model.model_type} models are not fla's": not is_from_fla(model),
        "its loop is of one process: use one GPU": processes > 1,
    }
    _refuse_first("fla", wrong)


def require_shape_of_torchtitan(model: Any, is_sharded: bool) -> None:
    """Raises `UserError` for a Hugging Face configuration that torchtitan has no model for."""
    kind = model.model_type
    rope = getattr(model, "rope_parameters", None) or {}
    rotations = {
        "llama": ("default", "llama3"),
        "qwen3": ("default",),
        "qwen3_moe": ("default",),
    }
    if kind not in rotations:
        raise UserError(
            f"bench: --against torchtitan: {kind} models are not among those that its driver "
            f"builds: {', '.join(rotations)}."
        )
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    _refuse_first(
        "torchtitan",
        {
            "its Llama has no tied embeddings: tie_word_embeddings": (
                kind == "llama" and model.tie_word_embeddings
            ),
            "its sharding does not keep embeddings tied: tie_word_embeddings": (
                is_sharded and model.tie_word_embeddings
            ),
            "its layers have no biases: attention_bias": model.attention_bias,
            "its layers have no biases: mlp_bias": getattr(model, "mlp_bias", False),
            "it has no dropout: attention_dropout": model.attention_dropout > 0,
            "its feed-forward blocks are SwiGLU: hidden_act": model.hidden_act != "silu",
            "its heads share hidden_size evenly: head_dim": (
                kind == "llama" and head * model.num_attention_heads != model.hidden_size
            ),
            f"it rotates otherwise: rope_type = {rope.get('rope_type')}": (
                rope.get("rope_type") not in rotations[kind]
            ),
            "it has no sliding windows: use_sliding_window": (
                getattr(model, "use_sliding_window", False)
            ),
            "all its layers have experts: decoder_sparse_step, mlp_only_layers": (
                kind == "qwen3_moe" and (model.decoder_sparse_step != 1 or model.mlp_only_layers)
            ),
            "it has no load-balancing loss: output_router_logits": (
                getattr(model, "output_router_logits", False)
            ),
        },
    )


def _refuse_first(peer: str, wrong: dict[str, object]) -> None:
    """Raises `UserError` for the first of these words whose condition holds."""
    for words, holds in wrong.items():
        if holds:
            raise UserError(f"bench: --against {peer}: {words}.")
