"""What a run will take, said before it: everything is resolved and checked, nothing started."""

import torch
from rich.table import Table

from lacuna.config import Config
from lacuna.config.console import open_console
from lacuna.config.errors import require_writable
from lacuna.config.learning_rate import learning_rate, peak_step, warmup_steps
from lacuna.data import build_loader, build_validation, run_tokenizer
from lacuna.model.build import plan_model, required_router
from lacuna.model.weights import weight_files
from lacuna.parallel.batch import curriculum_batches, total_steps
from lacuna.parallel.mesh import resolve_layout
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.processes import check_device, device_type
from lacuna.plan.memory import estimate_memory


def dry_run(config: Config, processes: int, device: str | None = None) -> None:
    """Prints model size, tokens a step, steps and estimated memory, for `processes` ranks.

    They are of the kind `device`, by default of this machine. Raises `UserError` for everything
    that the run itself would refuse.
    """
    device = device or device_type()
    check_device(config, device)
    require_writable(config.job.dump_folder)
    layout = resolve_layout(config, processes)
    _, batch = curriculum_batches(config, layout)[0]
    tokenizer = run_tokenizer(config)
    here = torch.device(device) if device == device_type() else None
    model = plan_model(config, tokenizer, layout, device, here)
    required_router(config, model.config, layout, here or torch.device("cpu"))
    if config.model.name_or_path:
        weight_files(config.model.name_or_path)
    loader = build_loader(config, tokenizer, batch, dp_rank=0)
    steps = total_steps(config, loader.rows_left, batch.global_batch)
    sequences = steps * batch.global_batch if loader.rows_left is None else loader.rows_left
    if config.validation.resolved_source() is not None:
        build_validation(config, tokenizer, batch, dp_rank=0)
    length, rate, schedule = config.training.seq_len, config.optimizer.lr, config.lr_scheduler
    compute = str(compute_dtype(config, device)).removeprefix("torch.")
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    degrees = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
    peak = peak_step(schedule, steps)
    highest = learning_rate(rate, schedule, peak, steps)
    estimate = estimate_memory(config, layout, batch, model, device)
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in estimate.items())
    rows = {
        "model": f"{type(model).__name__}, {model.num_parameters():,} parameters",
        "processes": f"{processes} on {device}: {degrees}",
        "precision": f"{config.training.dtype} weights, {compute} compute, "
        f"{model.config._attn_implementation} attention",
        "batch": f"{batch.global_batch} sequences = {batch.micro_batch} × {batch.accumulation} "
        f"accumulated × {layout.data_parallel} ranks",
        "tokens a step": f"{batch.global_batch * length:,} ({length} a sequence)",
        "steps": f"{steps:,}, {sequences * length:,} tokens",
        "learning rate": f"peak {highest:.3g}, in step {peak + 1:,} (optimizer.lr = {rate:g}, "
        f"{warmup_steps(schedule, steps):,} steps of warmup)",
        "memory a rank": f"about {sum(estimate.values()) / 2**30:.2f} GiB ({parts})",
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", value)
    open_console(config.metrics).print(table, "Nothing was started.")
