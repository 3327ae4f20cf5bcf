"""A training loop of your own, made from lacuna's parts.

python examples/own_loop.py [RUN.toml] [--section.key value ...], or the same under torchrun.

The parts are those of `lacuna train` (see lacuna/train/trainer.py): configuration, processes, data,
model, one step, checkpoints, export. Everything between them is yours to change.
"""

import os
import sys

import torch

from lacuna.config import load_config
from lacuna.config.devices import check_device
from lacuna.config.learning_rate import learning_rate
from lacuna.data import build_loader, merge_states, run_tokenizer
from lacuna.formats.checkpoint import model_tensors, newest_complete
from lacuna.formats.huggingface import export_model
from lacuna.formats.reader import read_state, read_tensors
from lacuna.formats.writer import write_checkpoint
from lacuna.model.build import build_model
from lacuna.objective.find import find_objective
from lacuna.parallel.batch import resolve_batch
from lacuna.parallel.mesh import build_mesh, resolve_layout
from lacuna.parallel.processes import device_type, gather_objects, start_process, stop_process
from lacuna.train.optimizer import build_optimizer, optimizer_tensors, update
from lacuna.train.step import accumulate_gradients, total_counts

path = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1].endswith(".toml") else None
config = load_config(path, sys.argv[1:])
check_device(config, device_type())
process = start_process(config.comm, config.job.dump_folder, config.training.enable_cpu_offload)
layout = resolve_layout(config.parallelism, process.world_size)
tokenizer = run_tokenizer(config.model, config.conversations)
batch = resolve_batch(config.training, config.parallelism, config.optimizer, layout)
mesh = build_mesh(layout, process.device.type)
loader = build_loader(config, tokenizer, batch, mesh.data_rank)
objective = find_objective(config.job.task)
built = build_model(config, tokenizer, mesh, process.device)
optimizer = build_optimizer(built.model, config.optimizer)
# These are no copies: a checkpoint is read into them in place.
tensors = model_tensors(built.model) | optimizer_tensors(built.model, optimizer)

first_step = 0
if checkpoint := newest_complete(config.job.dump_folder, process):
    read_tensors(checkpoint, tensors, process)
    state = read_state(checkpoint)
    loader.load_state_dict(merge_states(state["source"]))
    first_step = state["loop"]["step"]

batches = iter(loader)
for step in range(first_step, config.training.steps):
    micro_batches = [next(batches) for _ in range(batch.accumulation)]
    trained = total_counts(built, micro_batches)[objective.denominator]  # over all ranks
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(
            config.optimizer.lr, config.lr_scheduler, step, config.training.steps
        )
    loss, *_ = accumulate_gradients(built, micro_batches, objective.loss, trained)
    norm, skipped = update(built, optimizer, trained)
    if process.rank == 0 and step % config.metrics.log_freq == 0:
        mean = loss.item() * process.world_size / trained.item()
        print(f"step {step + 1}: loss {mean:.4f} on this rank")

target = os.path.join(config.job.dump_folder, f"step-{config.training.steps}")
state = {
    "loop": {"step": config.training.steps},
    "source": gather_objects(process, loader.state_dict()),
}
write_checkpoint(target, tensors, state, tokenizer.save_pretrained, process)
dtype = getattr(torch, config.checkpoint.export_dtype)
export_model(built.model, tokenizer, os.path.join(config.job.dump_folder, "hf"), dtype)
loader.close()
stop_process()
