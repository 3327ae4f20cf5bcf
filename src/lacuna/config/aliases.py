"""Names that other trainers use for our settings, and names that are refused with a reason."""

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

# Last part of a name in other trainers, even if it means something a little different there -> the
# setting of ours to propose.
MEANT: dict[str, str] = {
    "dryrun": "--dry-run",
    "learning_rate": "optimizer.lr",
    "warmup_ratio": "lr_scheduler.warmup_steps",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "lr_scheduler.decay_type",
    "num_train_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "max_steps": "training.steps",
    "per_device_train_batch_size": "training.batch_size",
    "micro_batch_size": "training.batch_size",
    "max_grad_norm": "training.max_norm",
    "clip_grad_norm": "training.max_norm",
    "max_length": "training.seq_len",
    "max_seq_length": "training.seq_len",
    "sequence_len": "training.seq_len",
    "block_size": "training.seq_len",
    "output_dir": "job.dump_folder",
    "run_name": "job.name",
    "model_name_or_path": "model.name_or_path",
    "base_model": "model.name_or_path",
    "train_file": "data.dataset",
    "validation_file": "validation.dataset",
    "logging_steps": "metrics.log_freq",
    "eval_steps": "validation.freq",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest_k",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
    "load_in_4bit": "quantization.base",
    "load_in_8bit": "quantization.base",
    "gradient_checkpointing": "activation_checkpoint.mode",
    "attn_implementation": "model.attention",
    "chat_template": "chat.template",
    "report_to": "metrics.enable_wandb",
    "bf16": "training.mixed_precision_param",
}

# Names that other trainers set to true where our setting is false.
OPPOSITE = frozenset(("metrics.save_for_all_ranks",))

_ARCHITECTURE = ("model.norm_type", "model.name", "model.flavor")

# Pattern of a name for which there is no setting -> the reason. The user is told to leave it out.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        _ARCHITECTURE,
        "the Hugging Face configuration decides; set model.config or model.name_or_path",
    ),
    "job.config_file": "a TOML file cannot name another; give it on the command line",
    "job.use_for_integration_test": "no test suite is chosen by configuration",
    "training.pin_memory": "batches are always pinned on a GPU",
    "training.persistent_workers": "data workers always stay alive",
    **dict.fromkeys(
        ("rollout.top_p", "rollout.top_k", "rollout.min_p"),
        "completions that are trained are drawn from the whole vocabulary at rollout.temperature; "
        "the ratios of their probabilities would be wrong otherwise",
    ),
    "checkpoint.initial_load_model_*only": (
        "checkpoint.initial_load_path loads weights only; to resume, start again"
    ),
    "checkpoint.initial_load_in_hf": "give the Hugging Face folder as model.name_or_path",
    "checkpoint.*_hf*": (
        "the final model is always exported to hf/; `lacuna convert` exports any other"
    ),
}
