"""The steps that `lacuna bench --against transformers` left in a folder, made by its Trainer.

python benchmarks/transformers_steps.py FOLDER
(in several processes by torchrun; `lacuna bench` starts it by itself)
"""

import sys
from typing import Any

from steps import Task, make_model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments


def main() -> None:
    task = Task(sys.argv[1])
    trainer = StepsTrainer(task)
    trainer.train()
    [first] = [row["loss"] for row in trainer.state.log_history if row.get("step") == 1]
    distributed = str(trainer.accelerator.distributed_type)
    task.write(first, distributed=distributed, arguments=trainer.args.to_dict())


class StepsTrainer(Trainer):
    """transformers' loop over the task's own batches, which it neither shuffles nor splits."""

    def __init__(self, task: Task) -> None:
        self.task = task
        super().__init__(
            model=make_model(task),
            args=arguments(task),
            train_dataset=task.tokens,
            callbacks=[Clock(task)],
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        # Already batched; the model takes labels that are shifted as shift_labels.
        batches = [batch | {"shift_labels": batch["labels"]} for batch in self.task.tokens]
        return DataLoader(batches, batch_size=None, pin_memory=self.task.is_on_gpu)


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
