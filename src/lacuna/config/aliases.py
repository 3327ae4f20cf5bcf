"""Names that other trainers use for our settings, names that are refused, and settings still to come."""

from lacuna.config.documents import DataConfig
from lacuna.config.machine import ParallelismConfig

# Name that another trainer uses -> canonical name.
RENAMED: dict[str, str] = {
    **{f"training.{field}": f"data.{field}" for field in DataConfig.model_fields},
    **{f"training.{field}": f"parallelism.{field}" for field in ParallelismConfig.model_fields},
    **{f"experimental.{field}": f"parallelism.{field}" for field in ParallelismConfig.model_fields},
    "training.compile": "compile.enable",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.local_batch_size": "training.batch_size",
    "optimizer.scheduler": "lr_scheduler.decay_type",
    "optimizer.fused": "optimizer.implementation",
    "optimizer.min_lr_ratio": "lr_scheduler.lr_min",
    "lr_scheduler.min_lr_ratio": "lr_scheduler.lr_min",
    "lr_scheduler.lr_min_ratio": "lr_scheduler.lr_min",
    "lr_scheduler.min_lr_factor": "lr_scheduler.lr_min",
    "checkpoint.enable": "checkpoint.enable_checkpoint",
    "checkpoint.last_save_model_weights_only": "checkpoint.model_weights_only",
    "checkpoint.last_save_model_only": "checkpoint.model_weights_only",
    "metrics.save_for_all_ranks": "metrics.rank_0_only",
    "model.hf_assets_path": "model.tokenizer_path",
    "job.print_config": "job.print_args",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
}

# Those of them that are true where ours is false.
OPPOSITE = frozenset(("metrics.save_for_all_ranks",))

_ARCHITECTURE = ("model.norm_type", "model.name", "model.flavor")

# Pattern of a name that nothing here answers to -> why it cannot be had; leaving it out is the mending.
REFUSED: dict[str, str] = {
    **dict.fromkeys(_ARCHITECTURE, "the Hugging Face configuration decides; set model.config or model.name_or_path"),
    "job.config_file": "a TOML file cannot name another; give it on the command line",
    "job.use_for_integration_test": "no test suite is chosen by configuration",
    "training.pin_memory": "batches are always pinned on a GPU",
    "training.persistent_workers": "data workers always stay alive",
    "checkpoint.hf_*": "models cannot be sent to the Hub yet; upload the folder hf/ of the run yourself",
    "checkpoint.initial_load_model_*only": "checkpoint.initial_load_path loads weights only; to resume, start again",
    "checkpoint.initial_load_in_hf": "give the Hugging Face folder as model.name_or_path",
    "checkpoint.*_hf*": "the final model is always exported to hf/; `lacuna convert` exports any other",
    **{f"{section}*": f"the section {section} is not available yet" for section in ("distillation", "grpo", "ppo")},
}
