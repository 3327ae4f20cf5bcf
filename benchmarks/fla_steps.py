"""The steps that `lacuna bench --against fla` left in a folder, by fla's model in a plain loop.

python benchmarks/fla_steps.py FOLDER
(`lacuna bench` starts it by itself)

This is what flame does of it: fla's model computes its own loss and is told where documents begin,
fully_shard mixes precisions, and torch's AdamW updates.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from steps import Task, make_model
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from transformers import PreTrainedModel

from lacuna.model.architecture import decoder_layers


def main() -> None:
    task = Task(sys.argv[1])
    settings = task.settings
    model = make_model(task).to(settings["device"]).train()
    if not task.is_on_gpu:
        model.config.fuse_cross_entropy = False  # its kernel refuses tensors of CPUs
    if settings["activation_checkpoint"]["mode"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = mix_precisions(model, task)
    optimizer = adamw(model, settings["optimizer"])
    rows = [*map(whole_rows, task.tokens)]
    losses = []
    size = settings["accumulation"]
    for step in range(settings["steps"]):
        batches = rows[step * size : (step + 1) * size]
        trained = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        parts = [backward(model, batch, trained, task) for batch in batches]
        losses.append(torch.stack(parts).sum())
        if settings["max_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        task.after_step(step + 1)
    values = torch.stack(losses).tolist()
    task.write(values[0], losses=values, precision=precision)
    if dist.is_initialized():
        dist.destroy_process_group()


def whole_rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A micro-batch in one row, with the bounds of its documents, and labels as fla shifts them.

    The label of the last token has no place in these.
    """
    labels = batch["labels"].flatten()
    starts = (batch["position_ids"].flatten() == 0).nonzero().flatten()
    return {
        "input_ids": batch["input_ids"].view(1, -1),
        "labels": F.pad(labels[:-1], (1, 0), value=-100)[None],
        "cu_seqlens": F.pad(starts, (0, 1), value=len(labels)),
    }


def mix_precisions(model: PreTrainedModel, task: Task) -> str:
    """Has parameters be computed with in the task's precision, in place, and says how."""
    settings = task.settings
    stored, computed = settings["dtype"], settings["compute"]
    if stored == computed:
        return f"all in {stored}"
    kind = "nccl" if task.is_on_gpu else "gloo"
    dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    policy = MixedPrecisionPolicy(getattr(torch, computed), torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return f"parameters and optimizer in {stored}; fully_shard casts to {computed}"


def adamw(model: PreTrainedModel, settings: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings["lr"],
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        fused=settings["implementation"] == "fused",
    )


def backward(model: PreTrainedModel, batch: dict[str, Tensor], trained: int, task: Task) -> Tensor:
    """Adds a micro-batch's gradients; its part of the mean loss of the step's trained tokens."""
    device = task.settings["device"]
    pinned = {name: one.pin_memory() if task.is_on_gpu else one for name, one in batch.items()}
    given = {name: one.to(device, non_blocking=True) for name, one in pinned.items()}
    loss: Tensor = model(**given, num_items_in_batch=trained).loss
    loss.backward()
    return loss.detach()


if __name__ == "__main__":
    main()
