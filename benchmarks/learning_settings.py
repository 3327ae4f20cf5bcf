"""The settings of every run of the learning experiment."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_task import RESULT, Sizes

PPO_UPDATES = 4
TRL_WAYS = {
    "trl": {},
    "trl-static": {"cache_implementation": "static"},
    "trl-batches": {"use_transformers_continuous_batching": True},
}
"""TRL's ways to generate in its own process, and their settings: transformers' `generate`, the same
with a static compiled cache, and its continuous batching."""


@dataclass(frozen=True)
class Learning:
    """A run: what it is called, and the settings of lacuna's that it has; TRL's has none."""

    name: str
    settings: dict[str, Any]

    @property
    def is_trl(self) -> bool:
        return self.name.startswith("trl")


def wanted(given: argparse.Namespace, sizes: Sizes) -> list[Learning]:
    """The runs of a call, in the order in which they are made."""
    runs = {}
    if given.sft_steps:
        runs["sft"] = Learning("sft", sft_settings(given, sizes))
    for seed in range(given.seeds):
        base = reward_settings(given, sizes, seed)
        by_success = {"curriculum.by_success": True}
        updates = {
            "job.task": "ppo",
            "ppo.updates": PPO_UPDATES,
            "ppo.beta": 0.0,
            "ppo.critic_lr": given.lr / 10,  # all of it is trained
            "optimizer.lr": given.lr / 2,  # there are more updates
            "training.steps": given.steps * PPO_UPDATES,
            "validation.freq": given.freq * PPO_UPDATES,
            "lr_scheduler.warmup_steps": warm_up(given) * PPO_UPDATES,
        }
        runs[f"grpo-{seed}"] = Learning(f"grpo-{seed}", base)
        if seed < given.trl_seeds:  # beside ours, in the same call where there is time
            # Batches take all memory that there is, which a CPU has better use for.
            for way in ("trl",) if given.tiny else TRL_WAYS:
                runs[f"{way}-{seed}"] = Learning(f"{way}-{seed}", base)
        runs[f"success-{seed}"] = Learning(f"success-{seed}", base | by_success)
        runs[f"ppo-{seed}"] = Learning(f"ppo-{seed}", base | updates)
    if unknown := [name for name in given.only if name not in runs]:
        sys.exit(f"no such runs: {', '.join(unknown)}; there are {', '.join(runs)}")
    return [runs[name] for name in given.only or runs]


def warm_up(given: argparse.Namespace) -> int:
    return int(min(10, given.steps // 2))


def sft_settings(given: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """What the model learns before: how sums are worked, and how they go wrong."""
    output = Path(given.output).resolve()
    begin: dict[str, Any] = {"model.config": str(output / "model")}
    if given.model:
        begin = {"model.name_or_path": given.model}
    return begin | {
        "job.task": "sft",
        "data.dataset": str(output / "task" / "sft.jsonl"),
        "chat.template": str(output / "task" / "plain.jinja"),
        "data.num_workers": 1 if given.tiny else 4,
        "training.steps": given.sft_steps,
        "training.batch_size": 4 if given.tiny else 64,
        "training.seq_len": sizes.sft_row,
        "optimizer.lr": 5e-5 if given.model else 1e-3,
        "checkpoint.interval": 200,
        "metrics.log_freq": 10,
        "metrics.enable_tensorboard": False,
    }


def reward_settings(given: argparse.Namespace, sizes: Sizes, seed: int) -> dict[str, Any]:
    """The settings of all runs by reward; `learning_trl.py` gives TRL the same."""
    output = Path(given.output).resolve()
    start = str(output / "sft" / "hf") if given.sft_steps else given.model
    return {
        "job.task": "grpo",
        "model.name_or_path": start,
        "data.dataset": str(output / "task" / "prompts.jsonl"),
        "data.num_workers": 0,
        "validation.dataset": str(output / "task" / "held_out.jsonl"),
        "validation.dataset_split": "train",
        "validation.freq": given.freq,
        "rewards.functions": ["exact"],
        "rewards.answer_pattern": RESULT,
        # It is measured as it is trained: the likeliest answer is right long before most are.
        "rollout.validation_temperature": 1.0,
        # A model so small has learnt sharply: noise of this size in all its weights ends it.
        "lora.rank": 16,
        "lora.alpha": 32,
        "rollout.samples": sizes.samples,
        "rollout.max_tokens": sizes.max_tokens,
        "rollout.batch_size": sizes.batch * sizes.samples,
        "training.seed": seed,
        "training.steps": given.steps,
        "training.batch_size": sizes.batch,
        "training.seq_len": 64 + sizes.max_tokens,
        "optimizer.lr": given.lr,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.decay_type": "constant",
        "lr_scheduler.warmup_steps": warm_up(given),
        "checkpoint.interval": 50,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": False,
    }
