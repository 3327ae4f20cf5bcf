"""The steps that `lacuna bench --against transformers` left in a folder, made by its Trainer.

python benchmarks/transformers_steps.py FOLDER
(in several processes by torchrun; `lacuna bench` starts it by itself)

Where EXPERTS_IMPLEMENTATION is set, as to `eager`, it is how transformers computes with experts.
"""

import gc
import os
import sys
import time
from typing import Any

import torch
from steps import Task, end_process, make_model
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments


def main() -> None:
    task = Task(sys.argv[1])
    trainer = StepsTrainer(task)
    trainer.train()
    experts = trainer.model.config._experts_implementation
    [first] = [row["loss"] for row in trainer.state.log_history if row.get("step") == 1]
    distributed = str(trainer.accelerator.distributed_type)
    task.write(first, distributed=distributed, experts=experts, arguments=trainer.args.to_dict())


class StepsTrainer(Trainer):
    """transformers' loop over the task's own batches, which it neither shuffles nor splits."""

    def __init__(self, task: Task) -> None:
        self.task = task
        model = make_model(task)
        asked = os.environ.get("EXPERTS_IMPLEMENTATION")
        if asked:
            model.set_experts_implementation(asked)
        elif needs_choice_of_experts(model, task):
            choose_experts(model, task)
        given = arguments(task)
        given._n_gpu = min(given.n_gpu, 1)  # or it has one process share its rows among all GPUs
        super().__init__(
            model=model,
            args=given,
            train_dataset=task.tokens,
            callbacks=[Clock(task)],
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        # Already batched; the model takes labels that are shifted as shift_labels.
        batches = [batch | {"shift_labels": batch["labels"]} for batch in self.task.tokens]
        return DataLoader(batches, batch_size=None, pin_memory=self.task.is_on_gpu)


def needs_choice_of_experts(model: PreTrainedModel, task: Task) -> bool:
    """Whether it is unknown which of transformers' ways to compute with experts is its fastest.

    Grouped products, its default, are fast in bfloat16. Autocast leaves them in float32, where
    torch multiplies by one expert after the other; sharded weights are cast before.
    """
    settings = task.settings
    mixes = settings["dtype"] != settings["compute"]
    alone = settings["processes"] == 1
    return task.is_on_gpu and mixes and alone and type(model)._can_set_experts_implementation()


def choose_experts(model: PreTrainedModel, task: Task) -> None:
    """Sets the faster of grouped products and a loop over experts, by three passes with each.

    The model is moved to where the steps will be made: weights of files are opened on the CPU.
    """
    model.to(task.settings["device"])
    seconds = {name: seconds_of_passes(model, task, name) for name in ("grouped_mm", "eager")}
    fastest = min(seconds, key=lambda name: seconds[name])
    print(f"experts: {fastest} of {seconds} seconds in three passes", flush=True)
    model.set_experts_implementation(fastest)
    model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def seconds_of_passes(model: PreTrainedModel, task: Task, experts: str) -> float:
    """The time of three passes forward and backward, after one that is not counted."""
    model.set_experts_implementation(experts)
    device = task.settings["device"]
    names = ("input_ids", "position_ids", "labels")
    given = {name: task.tokens[0][name].to(device) for name in names}
    began = 0.0
    for attempt in range(4):
        if attempt == 1:
            torch.cuda.synchronize()
            began = time.perf_counter()
        with torch.autocast(device, getattr(torch, task.settings["compute"])):
            loss = model(**given, shift_labels=given["labels"]).loss
        loss.backward()
    torch.cuda.synchronize()
    return time.perf_counter() - began


class Clock(TrainerCallback):
    def __init__(self, task: Task) -> None:
        self.task = task

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.task.after_step(state.global_step)


def arguments(task: Task) -> TrainingArguments:
    settings = task.settings
    optimizer = settings["optimizer"]
    is_sharded = settings["processes"] > 1 and settings["layout"]["dp_shard"] > 1
    recompute_all = settings["activation_checkpoint"]["mode"] == "full"
    recompute: dict[str, Any] = {}
    if recompute_all and is_sharded:
        recompute = {"fsdp_config": {"activation_checkpointing": True}}
    elif recompute_all:
        recompute = {"gradient_checkpointing": True}
    return TrainingArguments(
        output_dir=task.folder,
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["batch_size"],
        gradient_accumulation_steps=settings["accumulation"],
        learning_rate=optimizer["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused" if optimizer["implementation"] == "fused" else "adamw_torch",
        adam_beta1=optimizer["beta1"],
        adam_beta2=optimizer["beta2"],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=settings["max_norm"],
        bf16=settings["compute"] == "bfloat16" and settings["dtype"] == "float32",
        **recompute,
        torch_compile=bool(settings["compile"]),
        fsdp=is_sharded or None,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=True,
        use_cpu=not task.is_on_gpu,
        seed=settings["seed"],
        logging_strategy="no",
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )


if __name__ == "__main__":
    main()
    end_process()
