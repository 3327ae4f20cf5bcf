"""What another trainer is given, so that it makes the same steps of the same run."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from lacuna.data import build_loader
from lacuna.parallel.mesh import AXES
from lacuna.parallel.parallelize import compile_enabled
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.processes import gather_objects
from lacuna.train.bench import warm_up_steps
from lacuna.train.setup import Run


def hand_over(run: Run, folder: str, window: int) -> None:
    """Writes to `folder` what a peer needs to make the steps that were measured.

    That is a file of tokens for every rank, the model's configuration, and settings; all ranks must
    call it.
    """
    config = run.config
    process = run.process
    loader = build_loader(config, run.tokenizer, run.batch, run.data_rank)
    batches = [*islice(loader, run.total_steps * run.batch.accumulation)]
    loader.close()
    names = ("input_ids", "labels", "position_ids")
    tokens = [{name: batch.columns[name] for name in names} for batch in batches]
    torch.save(tokens, Path(folder, f"tokens-{process.rank}.pt"))
    counts = gather_objects(process, [batch.counts["tokens"] for batch in batches])
    if process.rank > 0:
        return
    run.built.model.config.save_pretrained(folder)
    shared = run.built.mesh.layout.sharing  # by so many ranks each row is read
    counted = [sum(same) / shared for same in zip(*counts, strict=True)]
    Path(folder, "task.json").write_text(json.dumps(_task(run, counted, window)))


def _task(run: Run, counts: list[float], window: int) -> dict[str, Any]:
    """What a peer is to do, in plain numbers and names."""
    config = run.config
    size = run.batch.accumulation
    steps = [sum(counts[first : first + size]) for first in range(0, len(counts), size)]
    device_type = run.process.device.type
    attention = config.model.attention
    return {
        "device": device_type,
        "processes": run.process.world_size,
        "layout": {axis: getattr(run.built.mesh.layout, axis) for axis in AXES},
        "steps": run.total_steps,
        "warm_up": warm_up_steps(window),
        "window": window,
        "tokens_of_steps": steps,
        "batch_size": run.batch.micro_batch,
        "accumulation": size,
        "sequences": run.batch.global_batch,
        "seq_len": config.training.seq_len,
        "weights": config.model.name_or_path,
        "trust_remote_code": config.model.trust_remote_code,
        "attention": "sdpa" if attention in ("auto", "varlen") else attention,
        "compile": config.compile.enable,
        "compiled": compile_enabled(config.compile, config.parallelism, device_type),
        "dtype": config.training.dtype,
        "compute": str(compute_dtype(config.training, device_type)).removeprefix("torch."),
        "max_norm": config.training.max_norm,
        "seed": config.training.seed,
        "deterministic": config.training.deterministic,
        "gc_freq": config.training.gc_freq,
        **{
            section: getattr(config, section).model_dump(mode="json")
            for section in ("optimizer", "parallelism", "activation_checkpoint", "float8", "lora")
        },
    }
