"""Says what a run will take: resolves and checks everything, and starts nothing."""

import torch
from rich.table import Table
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import Config, UserError, explained
from lacuna.config.console import open_console
from lacuna.config.devices import check_device
from lacuna.config.errors import require_writable
from lacuna.config.learning_rate import learning_rate, peak_step, warmup_steps
from lacuna.config.machine import (
    ActivationCheckpointConfig,
    MetricsConfig,
    ParallelismConfig,
)
from lacuna.config.optimizers import LRSchedulerConfig, OptimizerConfig
from lacuna.config.sections import ModelConfig
from lacuna.data import BatchSizes, build_loader, build_validation, run_tokenizer
from lacuna.model.architecture import decoder_layers
from lacuna.model.build import build_meta_model
from lacuna.model.checks import compiled_parts, required_router
from lacuna.model.weights import weight_files
from lacuna.objective.critic import layout_beside
from lacuna.objective.find import find_objective
from lacuna.objective.language_modelling import FrozenModel
from lacuna.parallel.batch import curriculum_batches, total_steps
from lacuna.parallel.mesh import resolve_layout
from lacuna.parallel.movable import require_compiled, require_several
from lacuna.parallel.parallelize import Compiled
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.processes import device_type
from lacuna.parallel.recompute import require_no_dropout
from lacuna.parallel.stages import stage_ranges
from lacuna.plan.frozen import frozen_memory
from lacuna.plan.memory import estimate_memory, peak_memory

_CPU = torch.device("cpu")
_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


def dry_run(config: Config, processes: int, device: str | None = None) -> None:
    """Prints model size, tokens a step, steps and estimated memory, for this many `processes`.

    The processes run on a `device` of this kind, by default that of this machine. Raises
    `UserError` for everything that the run itself would refuse.
    """
    device = device or device_type()
    check_device(config, device)
    require_writable(config.job.dump_folder)
    layout = resolve_layout(config.parallelism, processes)
    _, batch = curriculum_batches(config, layout)[0]
    tokenizer = run_tokenizer(config.model, config.conversations)
    objective = find_objective(config.job.task, config.trains_on)
    objective.check(config, tokenizer)
    here = torch.device(device) if device == device_type() else None
    model = build_meta_model(config, tokenizer, layout, device, here)
    router = required_router(config.job.task, config.model, model.config, here or _CPU)
    _require_weights(config.model)
    compute = compute_dtype(config.training, device)
    pieces = 1 if router is None else config.activation_checkpoint.mlp_chunks
    how = compute, model.config, pieces, device
    compiled = compiled_parts(config.compile, config.parallelism, *how)
    passes = config.activation_checkpoint, config.optimizer, compiled
    _require_passes(model, config.parallelism, layout.pp, *passes)
    loader = build_loader(config, tokenizer, batch, dp_rank=0)
    steps = total_steps(config.training, config.lr_scheduler, loader.rows_left, batch.global_batch)
    sequences = steps * batch.global_batch if loader.rows_left is None else loader.rows_left
    _require_visible_attention(config.metrics, model.config)
    if config.validation.resolved_source() is not None:
        build_validation(config, tokenizer, batch, dp_rank=0)
    degrees = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in _AXES)
    length = config.training.seq_len
    estimate = estimate_memory(config, layout, batch, model, device)
    for setting, frozen in objective.frozen_models(config).items():
        memory = _memory_beside(setting, frozen, processes, batch, device, here)
        estimate[setting.rpartition(".")[2]] = memory
    rows = {
        "model": f"{type(model).__name__}, {model.num_parameters():,} parameters",
        "processes": f"{processes} on {device}: {degrees}",
        "precision": f"{config.training.dtype} weights, "
        f"{str(compute).removeprefix('torch.')} compute, "
        f"{model.config._attn_implementation} attention",
        "batch": f"{batch.global_batch} sequences = {batch.micro_batch} × {batch.accumulation} "
        f"accumulated × {layout.data_parallel} ranks",
        "tokens a step": f"{batch.global_batch * length:,} ({length} a sequence)",
        "steps": f"{steps:,}, {sequences * length:,} tokens",
        "learning rate": _about_learning_rate(config.optimizer.lr, config.lr_scheduler, steps),
        "memory a rank": _about_memory(estimate, batch.accumulation, config.optimizer),
    }
    open_console(config.metrics).print(_table_of(rows), "Nothing was started.")


def _table_of(rows: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", value)
    return table


def _require_passes(
    model: PreTrainedModel,
    parallelism: ParallelismConfig,
    stages: int,
    recomputed: ActivationCheckpointConfig,
    optimizer: OptimizerConfig,
    compiled: Compiled,
) -> None:
    """Raises `UserError` for what building the run would refuse of a model's layers."""
    layers = decoder_layers(model)
    stage_ranges(parallelism.pipeline_parallel_split_points, stages, model, layers)
    require_no_dropout(layers, recomputed.mode)
    if recomputed.offload:
        require_compiled(recomputed.mode, compiled == "layers")
    if optimizer.state_offload_share:
        require_several(layers)


def _memory_beside(
    setting: str,
    frozen: FrozenModel,
    processes: int,
    batch: BatchSizes,
    device: str,
    here: torch.device | None,
) -> float:
    """Bytes that the second model takes that a `setting` asks for. Raises `UserError` for no such.

    It is spread over the processes by its own settings.
    """
    layout = layout_beside(frozen.config.parallelism, processes)
    with explained(setting, UserError, mend="choose another model"):
        memory = frozen_memory(frozen, layout, batch, device, here)
        _require_weights(frozen.config.model)
    return memory


def _require_visible_attention(metrics: MetricsConfig, model_config: PretrainedConfig) -> None:
    if metrics.attention:
        from lacuna.rollout.inspection import require_visible_attention  # an extension

        require_visible_attention(model_config)


def _about_memory(parts: dict[str, float], accumulation: int, optimizer: OptimizerConfig) -> str:
    peak = peak_memory(parts, accumulation, optimizer.state_offload_share)
    held = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    return f"about {peak / 2**30:.2f} GiB at a time ({held})"


def _require_weights(model: ModelConfig) -> None:
    """Raises `UserError` where a model starts from files of weights that are not there."""
    if model.name_or_path:
        weight_files(model.name_or_path)


def _about_learning_rate(rate: float, schedule: LRSchedulerConfig, steps: int) -> str:
    """The highest learning rate of a run of so many steps, and when it is reached."""
    peak = peak_step(schedule, steps)
    highest = learning_rate(rate, schedule, peak, steps)
    return (
        f"peak {highest:.3g}, in step {peak + 1:,} (optimizer.lr = {rate:g}, "
        f"{warmup_steps(schedule, steps):,} steps of warmup)"
    )
