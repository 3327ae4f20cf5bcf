"""Names that other trainers use for our settings, names that are refused, and settings still to come."""

from lacuna.config.machine import ParallelismConfig

_DATA = (
    "dataset", "dataset_name", "dataset_split", "data_dir", "data_files", "data_probs",
    "streaming", "num_workers", "prefetch_factor",
)  # fmt: skip

RENAMED: dict[str, str] = {
    **{f"training.{field}": f"data.{field}" for field in _DATA},
    **{f"training.{field}": f"parallelism.{field}" for field in ParallelismConfig.model_fields},
    **{f"experimental.{field}": f"parallelism.{field}" for field in ParallelismConfig.model_fields},
    "training.compile": "compile.enable",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.local_batch_size": "training.batch_size",
    "optimizer.min_lr_ratio": "lr_scheduler.lr_min",
    "lr_scheduler.min_lr_ratio": "lr_scheduler.lr_min",
    "lr_scheduler.lr_min_ratio": "lr_scheduler.lr_min",
    "lr_scheduler.min_lr_factor": "lr_scheduler.lr_min",
    "checkpoint.enable": "checkpoint.enable_checkpoint",
    "checkpoint.last_save_model_weights_only": "checkpoint.model_weights_only",
    "checkpoint.last_save_model_only": "checkpoint.model_weights_only",
    "model.hf_assets_path": "model.tokenizer_path",
    "job.print_config": "job.print_args",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
}
"""Old name -> canonical name, the value unchanged."""

CONVERTED: dict[str, dict[bool | str, dict[str, object]]] = {
    "optimizer.fused": {
        True: {"optimizer.implementation": "fused"},
        False: {"optimizer.implementation": "foreach"},
    },
    "optimizer.scheduler": {
        "linear": {"lr_scheduler.decay_type": "linear"},
        "cosine": {"lr_scheduler.decay_type": "cosine"},
        "wsd": {"lr_scheduler.decay_type": "linear"},
    },
    "metrics.save_for_all_ranks": {
        True: {"metrics.rank_0_only": False},
        False: {"metrics.rank_0_only": True},
    },
}
"""Old name -> each of its values -> what it means in canonical settings."""

IMPLIED: dict[tuple[str, bool | str], dict[str, object]] = {
    ("optimizer.scheduler", "wsd"): {"lr_scheduler.decay_ratio": 0.1},
}
"""(old name, value) -> settings that it brings along unless they are given."""

_NO_UPLOAD = "models cannot be sent to the Hub yet; upload the folder hf/ of the run yourself"
_ALWAYS_EXPORTED = "the final model is always exported to hf/; `lacuna convert` exports any other checkpoint"
_WEIGHTS_ONLY = "checkpoint.initial_load_path never loads more than weights; start a run again to resume it"
_HUGGING_FACE = "the Hugging Face configuration decides; set model.config or model.name_or_path"

REFUSED: dict[str, str] = {
    "model.norm_type": "the Hugging Face configuration decides which normalisation a model has",
    "model.name": _HUGGING_FACE,
    "model.flavor": _HUGGING_FACE,
    "job.config_file": "a TOML file cannot name another; give it on the command line",
    "job.use_for_integration_test": "no test suite is chosen by configuration",
    "training.pin_memory": "batches are always pinned on a GPU",
    "training.persistent_workers": "data workers always stay alive",
    "checkpoint.hf_upload_enabled": _NO_UPLOAD,
    "checkpoint.hf_repo_base_name": _NO_UPLOAD,
    "checkpoint.hf_upload_format": _NO_UPLOAD,
    "checkpoint.convert_to_hf_on_save": _ALWAYS_EXPORTED,
    "checkpoint.last_save_in_hf": _ALWAYS_EXPORTED,
    "checkpoint.initial_load_model_weights_only": _WEIGHTS_ONLY,
    "checkpoint.initial_load_model_only": _WEIGHTS_ONLY,
    "checkpoint.initial_load_in_hf": "give the Hugging Face folder as model.name_or_path",
}
"""Names that nothing here answers to, and why; leaving them out is the mending."""

_DELAYED = "torchao removed delayed scaling; use dynamic"
_NOTHING_RUNS = "the estimate is computed from shapes, nothing runs that could be faked; leave it out"
_ONLY_ONE = "the only complete checkpoint would be deleted while the newest is written; use 2 or more"

REFUSED_VALUES: dict[str, tuple[object, str]] = {
    "float8.scaling_type_input": ("delayed", _DELAYED),
    "float8.scaling_type_weight": ("delayed", _DELAYED),
    "float8.scaling_type_grad_output": ("delayed", _DELAYED),
    "memory_estimation.disable_fake_mode": (True, _NOTHING_RUNS),
    "checkpoint.keep_latest_k": (1, _ONLY_ONE),
    "parallelism.data_parallel_shard_degree": (0, "use a number of ranks, or -1 for all that remain"),
    "parallelism.zero_stage": (1, "ZeRO stage 1 is not available yet; use 2 or 3"),
    "validation.steps": (0, "use a number of batches, or -1 for all"),
}
"""Canonical name -> the one value that is refused, and why."""

_COMING = {
    "tensor_parallel": "tensor parallelism",
    "disable_loss_parallel": "tensor parallelism",
    "enable_async_tensor_parallel": "tensor parallelism",
    "context_parallel": "context parallelism",
    "pipeline_parallel": "pipeline parallelism",
    "expert_parallel": "expert parallelism",
    "enable_compiled_autograd": "compiling the whole backward pass",
}

NOT_YET: dict[str, str] = {
    "job.task": "any task but pretrain",
    "training.enable_cpu_offload": "offloading to the CPU",
    "optimizer.early_step_in_backward": "updating during the backward pass",
    "activation_checkpoint.mode": "recomputing activations",
    "float8.enable_float8_linear": "float8",
    "float8.enable_fsdp_float8_all_gather": "float8",
    "float8.precompute_float8_dynamic_scale_for_fsdp": "float8",
    "float8.recipe_name": "float8",
    **{
        f"parallelism.{field}": what
        for field in ParallelismConfig.model_fields
        for start, what in _COMING.items()
        if field.startswith(start)
    },
}
"""Canonical name -> what a value other than its default would turn on, once that is available."""

NOT_YET_SECTIONS = frozenset(("chat", "packing", "lora", "quantization", "curriculum", "distillation", "grpo", "ppo"))
"""Sections that will hold settings once their feature is available."""
