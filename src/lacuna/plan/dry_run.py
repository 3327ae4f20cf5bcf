"""What a run will take, said before it: everything is resolved and checked, memory estimated, nothing started."""

import torch
from rich.table import Table
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import Config
from lacuna.config.errors import require_writable
from lacuna.data import BatchPlan, build_loader, build_validation, run_tokenizer
from lacuna.model.architecture import attention_heads, decoder_layers, head_dim, layer_settings
from lacuna.model.build import embeds_on_cpu, plan_model, required_router
from lacuna.model.loss import CHUNK_BYTES
from lacuna.model.quantization import packed_sizes, quantized_modules
from lacuna.model.weights import weight_files
from lacuna.objective.find import find_objective
from lacuna.parallel.fsdp import is_alone, reshard_after_forward
from lacuna.parallel.mesh import Layout, resolve_layout
from lacuna.parallel.parallelize import compile_enabled
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.processes import check_device, device_type
from lacuna.parallel.schedule import held_stages, most_unfinished, pipeline_order
from lacuna.train.metrics import open_console
from lacuna.train.optimizer import learning_rate, peak_step, warmup_steps
from lacuna.train.setup import plan_stages, total_steps


def dry_run(config: Config, processes: int, device: str | None = None) -> None:
    """Prints model size, tokens a step, steps and estimated memory for `processes` ranks, by default of this machine.

    Raises `UserError` for everything that the run itself would refuse.
    """
    device = device or device_type()
    check_device(config, device)
    require_writable(str(config.job.dump_folder))
    layout = resolve_layout(config, processes)
    _, plan = plan_stages(config, layout)[0]
    tokenizer = run_tokenizer(config)
    find_objective(config.job.task).check(config, tokenizer)
    here = torch.device(device) if device == device_type() else None
    model = plan_model(config, tokenizer, layout, device, here)
    required_router(config, model.config, layout, here or torch.device("cpu"))
    if config.model.name_or_path:
        weight_files(config.model.name_or_path)
    loader = build_loader(config, tokenizer, plan, dp_rank=0)
    steps = total_steps(config, loader, plan.global_batch)
    rows_in_all = steps * plan.global_batch if loader.rows_left is None else loader.rows_left
    if config.validation.resolved_source() is not None:
        build_validation(config, tokenizer, plan, dp_rank=0)
    compute, estimate = (
        compute_dtype(config, device),
        estimate_memory(config, layout, plan, model, device),
    )
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in estimate.items())
    step_tokens, peak = plan.global_batch * config.training.seq_len, peak_step(config, steps)
    rows = {
        "model": f"{type(model).__name__}, {model.num_parameters():,} parameters",
        "processes": f"{processes} on {device}: dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} × "
        f"cp {layout.cp} × tp {layout.tp} × pp {layout.pp}",
        "precision": f"{config.training.dtype} weights, {str(compute).removeprefix('torch.')} compute, "
        f"{model.config._attn_implementation} attention",
        "batch": f"{plan.global_batch} sequences = {plan.micro_batch} × {plan.accumulation} accumulated × "
        f"{layout.data_parallel} ranks",
        "tokens a step": f"{step_tokens:,} ({config.training.seq_len} a sequence)",
        "steps": f"{steps:,}, {rows_in_all * config.training.seq_len:,} tokens",
        "learning rate": f"peak {learning_rate(config, peak, steps):.3g}, in step {peak + 1:,} "
        f"(optimizer.lr = {config.optimizer.lr:g}, {warmup_steps(config, steps):,} steps of warmup)",
        "memory a rank": f"about {sum(estimate.values()) / 2**30:.2f} GiB ({parts})",
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", value)
    open_console(config).print(table, "Nothing was started.")


def layers_in_flight(config: Config, layout: Layout, microbatches: int, layers: int) -> float:
    """For how many layers a rank holds the activations of a micro-batch: in a pipeline, on the rank with most."""
    if layout.pp == 1:
        return layers
    order = pipeline_order(config.parallelism, microbatches)
    return (
        max(map(most_unfinished, order.values()))
        * layers
        / sum(map(len, held_stages(order).values()))
    )


def _kept_values(
    text: PretrainedConfig, layers: float, tp: int, fused: bool, recomputed: float
) -> float:
    """What `layers` keep for the backward pass, per token: a count of the tensors a decoder layer saves.

    Attention keeps its input, normed input, query, key, value and output; the feed-forward part its
    input, normed input and three (gated) or two wide tensors. Uncompiled code also keeps the
    intermediate results of norms, rotations and activations, about as much again. Of what is
    recomputed, the layers' inputs and one layer remain. Tensor parallelism divides all of it but
    the normed inputs, which it gathers.
    """
    hidden, heads = text.hidden_size, attention_heads(text)
    key_value = getattr(text, "num_key_value_heads", None) or heads
    wide = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    divided = 2 * hidden + 2 * (heads + key_value) * head_dim(text) + 3 * wide
    layer = (2 * hidden + divided / tp) * (1 if fused else 2)
    kept = layers * ((1 - recomputed) * layer + recomputed * hidden / tp) + (
        layer if recomputed else 0
    )
    return kept + 2 * hidden / tp


def estimate_memory(
    config: Config, layout: Layout, plan: BatchPlan, model: PreTrainedModel, device: str
) -> dict[str, float]:
    """Bytes by what holds them on the rank that needs most, with an even share of the layers.

    `model` needs no memory itself; the allocator's rounding and the CUDA context (about 1 GiB) come
    on top. Of a pipeline it is taken to have the larger end: the embedding or the head, as large as
    each other, and the loss. What is outside the layers, tensor parallelism only stores in shares.
    A quantised weight counts as so many that are not as it takes the room of.
    """
    text, shards = model.config.get_text_config(), layout.dp_shard * layout.cp
    compute, compiled = compute_dtype(config, device), compile_enabled(config, device)
    master = getattr(torch, config.training.dtype).itemsize
    stored = compute.itemsize if config.lora.rank else master
    quantised = quantized_modules(model).values()
    room = {weight: weight.numel() for weight in model.parameters()}
    room |= {
        layer.weight: sum(packed_sizes(*type(layer).quantized)) / stored for layer in quantised
    }
    layers = [sum(map(room.get, layer.parameters())) for layer in decoder_layers(model)]
    total = sum(room.values())
    head = text.vocab_size * text.hidden_size
    outside = head if layout.pp > 1 else total - sum(layers)
    inside, layer = sum(layers) / layout.pp / layout.tp, max(layers) / layout.tp
    shard = (outside / layout.tp + inside) / shards
    # All of it but where adapters are.
    learns = sum(weight.numel() for weight in model.parameters() if weight.requires_grad) / total
    reduced = getattr(torch, config.training.mixed_precision_reduce).itemsize
    gathered = compute.itemsize if config.quantization.base == "none" else master  # of what learns
    alone = is_alone(config, layout)
    copies = not (alone and compiled) and (compute.itemsize != stored or shards > 1)
    at_once = outside + (2 * layer if reshard_after_forward(config, layout) else inside)
    unreduced = (
        0 if alone else outside + (inside if layout.pp > 1 else layer)
    )  # a pipeline reduces at its end
    learning_head = model.get_output_embeddings().weight.requires_grad
    tokens = plan.micro_batch * config.training.seq_len / layout.cp
    in_flight = layers_in_flight(config, layout, plan.accumulation, len(layers))
    elsewhere = head * stored * embeds_on_cpu(config, layout, model, device)
    recompute = config.activation_checkpoint
    selective = (
        0.5 if recompute.selective_ac_option == "op" else 1 / int(recompute.selective_ac_option)
    )
    recomputed = {
        "none": 0,
        "full": 1,
        "selective": selective,
        "memory_budget": 1 - recompute.memory_budget,
    }
    widest = max(layer_settings(text), key=head_dim)
    kept = _kept_values(widest, in_flight, layout.tp, compiled, recomputed[recompute.mode])
    return {
        "weights": shard * (learns * master + (1 - learns) * stored) - elsewhere,
        "gradients": learns * (shard * master + unreduced * (gathered + reduced)),
        "optimizer": 2 * learns * shard * master,
        "gathered": at_once * (learns * gathered + (1 - learns) * compute.itemsize)
        if copies
        else 0,
        "activations": tokens * kept * compute.itemsize,
        "loss": 3 * min(CHUNK_BYTES, 4 * tokens / layout.tp * text.vocab_size)
        + 4 * head * learning_head,
    }
