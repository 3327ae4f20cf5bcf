"""What TRL's RewardTrainer makes of pairs: the loss and every gradient, from plain token ids.

Whatever imports this module is skipped where TRL is not installed: it is no dependency.
"""

import os
import tempfile
from copy import deepcopy
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from tiny import tokenizer_of_words

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")


def reward(
    model: PreTrainedModel, chosen: list[list[int]], rejected: list[list[int]]
) -> tuple[float, Tensor, dict[str, float]]:
    """The loss of one batch, the gradients of all parameters, flat, and what is logged."""
    rows = {"chosen": ["w4 w5"], "rejected": ["w4 w6"]}
    with tempfile.TemporaryDirectory() as folder:
        args = trl.RewardConfig(
            folder,
            per_device_train_batch_size=len(chosen),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        )
        trainer: Any = trl.RewardTrainer(
            model=deepcopy(model),
            args=args,
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer_of_words(),
        )
        batch = trainer.data_collator(
            [
                {"chosen_ids": better, "rejected_ids": worse}
                for better, worse in zip(chosen, rejected, strict=True)
            ]
        )
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
        logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        return loss.item(), torch.cat(gradients), logged
