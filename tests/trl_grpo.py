"""What TRL's GRPOTrainer makes of completions: the loss and every gradient, from plain token ids.

Whatever imports this module is skipped where TRL is not installed: it is no dependency.
"""

import os
import tempfile
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from tiny import tokenizer_of_words

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")

PAD = 0


class Trained(NamedTuple):
    """A completion of a prompt, its advantage, and log-probabilities of its tokens."""

    prompt: list[int]
    tokens: list[int]
    advantage: float
    old: list[float]
    reference: list[float]


def grpo(
    model: PreTrainedModel,
    samples: list[Trained],
    temperature: float,
    longest: int,
    beta: float = 0.0,
    **settings: Any,
) -> tuple[float, Tensor]:
    """The loss of one batch and the gradients of all parameters, flat; the model is copied."""
    rows = {"prompt": ["w4"] * len(samples)}
    with tempfile.TemporaryDirectory() as folder:
        args = trl.GRPOConfig(
            folder,
            per_device_train_batch_size=len(samples),
            num_generations=len(samples),
            max_completion_length=longest,
            temperature=temperature,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            **settings,
        )
        trainer = trl.GRPOTrainer(
            model=deepcopy(model),
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            args=args,
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer_of_words(),
        )
        trainer.model.train()
        trainer.beta = beta  # only now: no reference is loaded, since its values are given
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model, _inputs(samples))
        loss.backward()
        gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
        return loss.item(), torch.cat(gradients)


def _inputs(samples: list[Trained]) -> dict[str, Tensor]:
    """A batch as TRL's trainer has it: prompts padded on the left, completions on the right."""
    prompts = max(len(one.prompt) for one in samples)
    completions = max(len(one.tokens) for one in samples)

    def padded(values: list[list[float]], width: int, left: bool, fill: float) -> Tensor:
        gaps = [[fill] * (width - len(row)) for row in values]
        pairs = zip(values, gaps, strict=True)
        return torch.tensor([gap + row if left else row + gap for row, gap in pairs])

    ones = [[1] * len(one.tokens) for one in samples]
    return {
        "prompt_ids": padded([one.prompt for one in samples], prompts, True, PAD),
        "prompt_mask": padded([[1] * len(one.prompt) for one in samples], prompts, True, 0),
        "completion_ids": padded([one.tokens for one in samples], completions, False, PAD),
        "completion_mask": padded(ones, completions, False, 0),
        "advantages": torch.tensor([one.advantage for one in samples]),
        "old_per_token_logps": padded([one.old for one in samples], completions, False, 0.0),
        "ref_per_token_logps": padded([one.reference for one in samples], completions, False, 0.0),
        "num_items_in_batch": torch.tensor(float(sum(len(one.tokens) for one in samples))),
    }
