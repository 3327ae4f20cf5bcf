"""`--dry-run`: everything is resolved and checked, nothing is started."""

from rich.console import Console
from rich.table import Table

from lacuna.config import Config
from lacuna.data import build_loader, build_validation, run_tokenizer
from lacuna.model.architecture import non_embedding_parameters
from lacuna.model.build import plan_model
from lacuna.model.weights import weight_files
from lacuna.parallel.fsdp import compute_dtype
from lacuna.parallel.mesh import resolve_layout
from lacuna.parallel.parallelize import compile_enabled
from lacuna.parallel.processes import check_device, device_type
from lacuna.plan.memory import estimate_memory
from lacuna.train.batch import plan_batch
from lacuna.train.setup import total_steps


def dry_run(config: Config, processes: int, device: str | None = None) -> None:
    """Prints model size, tokens a step, steps and estimated memory for `processes` ranks, by default of this machine.

    Raises `UserError` for everything that the run itself would refuse.
    """
    device = device or device_type()
    check_device(config, device)
    layout = resolve_layout(config, processes)
    plan = plan_batch(config, layout)
    tokenizer = run_tokenizer(config)
    model = plan_model(config, tokenizer, layout, device)
    if config.model.name_or_path:
        weight_files(config.model.name_or_path)
    loader = build_loader(config, tokenizer, dp_rank=0, dp_world=layout.data_parallel, **vars(plan))
    if config.validation.resolved_source() is not None:
        build_validation(config, tokenizer, dp_rank=0, dp_world=1, micro_batch=plan.micro_batch)
    steps = total_steps(config, loader)
    loader.close()
    compute = compute_dtype(config, device)
    estimate = estimate_memory(config, layout, plan, model, compute, compile_enabled(config, device))
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in estimate.items())
    step_tokens = plan.global_batch * config.training.seq_len
    rows = {
        "model": f"{type(model).__name__}, {model.num_parameters():,} parameters "
        f"({non_embedding_parameters(model):,} in matrix products)",
        "processes": f"{processes} on {device}: dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} × "
        f"cp {layout.cp} × tp {layout.tp} × pp {layout.pp}",
        "precision": f"{config.training.dtype} weights, {str(compute).removeprefix('torch.')} compute",
        "attention": model.config._attn_implementation,
        "batch": f"{plan.global_batch} sequences = {plan.micro_batch} × {plan.accumulation} accumulated × "
        f"{layout.data_parallel} ranks",
        "tokens a step": f"{step_tokens:,} ({config.training.seq_len} a sequence)",
        "steps": f"{steps:,}, {steps * step_tokens:,} tokens",
        "memory a rank": f"about {sum(estimate.values()) / 2**30:.2f} GiB ({parts})",
        "run folder": str(config.job.dump_folder),
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", value)
    console = Console(no_color=config.metrics.disable_color_printing, highlight=False)
    console.print(table, "Nothing was started.")
