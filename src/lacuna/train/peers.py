"""What another trainer is given, so that it makes the same steps of the same run."""

import json
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from lacuna.config import Config, UserError
from lacuna.data import build_loader
from lacuna.parallel.mesh import resolve_layout
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.processes import gather_objects
from lacuna.train.bench import warm_up_steps
from lacuna.train.setup import Run

# Settings that a peer is given as well, or that change nothing of what is measured. Any other must
# have its default.
_SHARED = (
    "job.task=sft",
    "job.[!t]*",
    "model.name_or_path=*",
    "model.config=*",
    "model.tokenizer_path=*",
    "model.trust_remote_code=*",
    "model.attention=*",
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
    "parallelism.data_parallel_*",
    "training.[!e]*",
    "training.epochs=*",
)


def require_comparable(config: Config, peer: str, processes: int, device: str) -> None:
    """Raises `UserError` for a run that the peer could not make as it is."""
    default = Config()
    changed = [
        f"{section}.{name}={value}"
        for section, table in config
        for name, value in table
        if value != getattr(getattr(default, section), name)
    ]
    for setting in changed:
        if not any(fnmatchcase(setting, pattern) for pattern in _SHARED):
            raise UserError(
                f"bench: --against {peer} has nothing like {setting}: leave out one of the two."
            )
    if str(config.model.name_or_path).endswith(".gguf"):
        raise UserError(f"bench: --against {peer} opens no GGUF file as model.name_or_path.")
    is_sharded = resolve_layout(config.parallelism, processes).dp_shard > 1
    if is_sharded and device == "cpu":
        raise UserError(
            f"bench: --against {peer} shards nothing on CPUs: set "
            f"parallelism.data_parallel_replicate_degree = {processes}."
        )


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
    counted = [sum(same) for same in zip(*counts, strict=True)]
    Path(folder, "task.json").write_text(json.dumps(_task(run, counted, window)))


def _task(run: Run, counts: list[float], window: int) -> dict[str, Any]:
    """What a peer is to do, in plain numbers and names."""
    config = run.config
    size = run.batch.accumulation
    steps = [sum(counts[first : first + size]) for first in range(0, len(counts), size)]
    layout = run.built.mesh.layout
    attention = config.model.attention
    compute = compute_dtype(config.training, run.process.device.type)
    return {
        "device": run.process.device.type,
        "processes": run.process.world_size,
        "sharded": layout.dp_shard > 1,
        "steps": run.total_steps,
        "warm_up": warm_up_steps(window),
        "window": window,
        "tokens_of_steps": steps,
        "batch_size": run.batch.micro_batch,
        "accumulation": size,
        "seq_len": config.training.seq_len,
        "weights": config.model.name_or_path,
        "trust_remote_code": config.model.trust_remote_code,
        "attention": "sdpa" if attention in ("auto", "varlen") else attention,
        "compile": config.compile.enable,
        "recompute": config.activation_checkpoint.mode == "full",
        "dtype": config.training.dtype,
        "compute": str(compute).removeprefix("torch."),
        "max_norm": config.training.max_norm,
        "seed": config.training.seed,
        "optimizer": config.optimizer.model_dump(mode="json"),
    }
