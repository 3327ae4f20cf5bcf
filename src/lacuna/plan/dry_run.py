"""`--dry-run`: everything is resolved and checked, nothing is started."""

import torch
from rich.console import Console
from rich.table import Table

from lacuna.config import Config
from lacuna.data import build_loader, build_validation, load_tokenizer
from lacuna.model.architecture import decoder_layers, load_model_config, non_embedding_parameters
from lacuna.model.attention import choose_attention
from lacuna.model.build import meta_model
from lacuna.model.weights import safetensors_files, weight_folder
from lacuna.parallel.fsdp import compute_dtype, reshard_after_forward
from lacuna.parallel.mesh import resolve_layout
from lacuna.parallel.parallelize import compile_enabled
from lacuna.parallel.processes import check_device, device_type
from lacuna.plan.memory import MemoryEstimate, estimate_memory
from lacuna.train.batch import plan_batch
from lacuna.train.setup import tokenizer_source, total_steps


def dry_run(config: Config, processes: int) -> None:
    """Prints model size, tokens a step, steps and estimated memory for `processes` ranks.

    Raises `UserError` for everything that the run itself would refuse.
    """
    device = device_type()
    check_device(config, device)
    layout = resolve_layout(config, processes)
    plan = plan_batch(config, layout.data_parallel)
    tokenizer = load_tokenizer(tokenizer_source(config))
    model_config = load_model_config(config, tokenizer)
    compute = compute_dtype(config, device)
    attention = choose_attention(config, model_config, device, compute)
    model = meta_model(model_config, attention, getattr(torch, config.training.dtype))
    if config.model.name_or_path:
        safetensors_files(weight_folder(config.model.name_or_path))
    loader = build_loader(
        config, tokenizer, dp_rank=0, dp_world=layout.data_parallel, **vars(plan)
    )  # fmt: skip
    if config.validation.resolved_source() is not None:
        build_validation(config, tokenizer, dp_rank=0, dp_world=1, micro_batch=plan.micro_batch)
    steps = total_steps(config, loader)
    loader.close()
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder_layers(model)]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    estimate = estimate_memory(
        config, model_config, parameters, parameters - sum(layers), max(layers), layout.dp_shard, compute,
        compile_enabled(config, device), reshard_after_forward(config),
    )  # fmt: skip
    step_tokens = plan.global_batch * config.training.seq_len
    rows = {
        "model": f"{type(model).__name__}, {parameters:,} parameters ({non_embedding_parameters(model):,} in "
        f"matrix products)",
        "processes": f"{processes} on {device}: data_parallel_replicate_degree {layout.dp_replicate} × "
        f"data_parallel_shard_degree {layout.dp_shard}",
        "precision": f"{config.training.dtype} weights, {str(compute).removeprefix('torch.')} compute",
        "attention": attention,
        "batch": f"{plan.global_batch} sequences = {plan.micro_batch} × {plan.accumulation} accumulated × "
        f"{layout.data_parallel} ranks",
        "tokens a step": f"{step_tokens:,} ({config.training.seq_len} a sequence)",
        "steps": f"{steps:,}, {steps * step_tokens:,} tokens",
        "memory a rank": _memory_line(estimate),
        "run folder": str(config.job.dump_folder),
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", value)
    console = Console(no_color=config.metrics.disable_color_printing, highlight=False)
    console.print(table)
    console.print("Nothing was started.")


def _memory_line(estimate: MemoryEstimate) -> str:
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in vars(estimate).items())
    return f"about {estimate.total / 2**30:.2f} GiB ({parts})"
