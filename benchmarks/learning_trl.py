"""A run of the learning experiment by TRL's GRPOTrainer: python benchmarks/learning_trl.py FOLDER

`learning.py` starts it, and wrote the settings of our own run to FOLDER/task.json. What it measures
goes to FOLDER/metrics.jsonl, under the names that ours has.
"""

import json
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from learning_task import RESULT
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

IS_ON_GPU = torch.cuda.is_available()
AT_ONCE = 256
"""Held-out prompts that are answered together."""


def main() -> None:
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text())
    settings = task["settings"]
    name = settings["model.name_or_path"]
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    watch = Watch(folder, settings, tokenizer)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        reward_funcs=exact,
        args=arguments(folder, settings, task["way"], task["parts"]),
        train_dataset=Dataset.from_list(rows_of(settings["data.dataset"])),
        processing_class=tokenizer,
        callbacks=[watch],
        peft_config=LoraConfig(
            r=settings["lora.rank"],
            lora_alpha=settings["lora.alpha"],
            target_modules="all-linear",
        ),
    )
    saved = sorted(folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=bool(saved))
    if trainer.state.global_step >= settings["training.steps"]:
        (folder / "finished.json").write_text(json.dumps({"step": trainer.state.global_step}))


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """What lacuna's reward of this name is, with the same pattern."""
    pairs = zip(completions, answer, strict=True)
    return [float(re.findall(RESULT, said)[-1:] == [wanted]) for said, wanted in pairs]


def rows_of(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def arguments(
    folder: Path, settings: dict[str, Any], way: dict[str, Any], parts: int
) -> GRPOConfig:
    """Our settings by TRL's names; dapo's loss is its default as it is ours.

    A batch of completions, made at once in this `way`, is trained in so many `parts`.
    """
    samples = settings["rollout.samples"]
    return GRPOConfig(
        str(folder),
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        per_device_train_batch_size=settings["training.batch_size"] * samples // parts,
        gradient_accumulation_steps=parts,
        num_generations=samples,
        max_completion_length=settings["rollout.max_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_steps=settings["training.steps"],
        learning_rate=settings["optimizer.lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["lr_scheduler.warmup_steps"],
        optim="adamw_torch_fused" if IS_ON_GPU else "adamw_torch",
        adam_beta2=settings["optimizer.beta2"],
        weight_decay=settings["optimizer.weight_decay"],
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=IS_ON_GPU,
        use_cpu=not IS_ON_GPU,
        **way,  # with continuous batching and bf16 TRL makes the weights themselves bfloat16
        seed=settings["training.seed"],
        save_steps=settings["checkpoint.interval"],
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


class Watch(TrainerCallback):
    """Measures steps and held-out prompts, and ends the run where it is told to."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.file = folder / "metrics.jsonl"
        self.settings = settings
        self.tokenizer = tokenizer
        self.held_out = rows_of(settings["validation.dataset"])
        self.is_over = False
        self.began = 0.0
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "is_over", True))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        rows = self.file.read_text().splitlines() if self.file.exists() else []
        kept = [row for row in rows if json.loads(row)["step"] <= state.global_step]
        if not state.global_step:
            kept = []
        self.file.write_text("".join(f"{row}\n" for row in kept))
        if not state.global_step:
            self.measure(model, 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = now()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        step = state.global_step
        self.write({"step": step, "seconds": now() - self.began, "memory_gib": peak_memory()})
        if step % self.settings["validation.freq"] == 0 or step == self.settings["training.steps"]:
            self.measure(model, step)
        if self.is_over:
            control.should_save = True
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:
            flat = logs.get("frac_reward_zero_std")
            self.write({"step": state.global_step, "reward": logs["reward"], "flat_groups": flat})

    def measure(self, model: PreTrainedModel, step: int) -> None:
        """Writes the share of held-out prompts that a completion of each solves."""
        answers: list[str] = []
        is_training = model.training
        model.eval()
        for first in range(0, len(self.held_out), AT_ONCE):
            asked = [row["prompt"] for row in self.held_out[first : first + AT_ONCE]]
            inputs = self.tokenizer(asked, return_tensors="pt", padding=True).to(model.device)
            inputs.pop("token_type_ids", None)
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=IS_ON_GPU):
                said = model.generate(
                    **inputs,
                    max_new_tokens=self.settings["rollout.max_tokens"],
                    do_sample=True,
                    temperature=self.settings["rollout.validation_temperature"],
                    top_p=1.0,
                    top_k=0,
                    pad_token_id=self.tokenizer.pad_token_id,
                    eos_token_id=self.tokenizer.eos_token_id,
                )
            after = said[:, inputs["input_ids"].shape[1] :]
            answers += self.tokenizer.batch_decode(after, skip_special_tokens=True)
        model.train(is_training)
        rewards = exact(answers, [row["answer"] for row in self.held_out])
        self.write({"step": step, "val_pass_at_1": sum(rewards) / len(rewards)})
        if IS_ON_GPU:  # what this took is not what training takes
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def write(self, row: dict[str, Any]) -> None:
        with open(self.file, "a") as file:
            file.write(json.dumps(row) + "\n")


def now() -> float:
    """The time when the device is done."""
    if IS_ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory() -> float:
    """Peak memory in GiB, as lacuna's `memory_gib`: reserved on a GPU, else of the process."""
    if IS_ON_GPU:
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
