"""Loss on held-out data, and text sampled on the way."""

import json
import math
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.data import Batch
from lacuna.model.build import BuiltModel
from lacuna.objective.language_modelling import language_modelling_loss
from lacuna.parallel.fsdp import inference
from lacuna.parallel.processes import Process
from lacuna.rollout.generate import generate_text


def evaluate(built: BuiltModel, batches: Iterable[Batch], process: Process) -> tuple[float, float]:
    """Loss in nats per trained token, and bits per byte of text (nan where the bytes are unknown), over all ranks.

    The bytes that the untrained first token of each document stands for are taken out in proportion.
    """
    loss = torch.zeros((), dtype=torch.float64, device=process.device)
    counts = torch.zeros(3, dtype=torch.float64)
    with inference(built.model):
        for batch in batches:
            loss += language_modelling_loss(built, batch, process.device)
            counts += torch.tensor([batch.trained_tokens, batch.tokens, batch.text_bytes], dtype=torch.float64)
    totals = torch.cat([loss[None], counts.to(process.device)])
    dist.all_reduce(totals)
    nats, trained, tokens, text_bytes = totals.tolist()
    mean = nats / trained if trained else math.nan
    bits_per_byte = mean / math.log(2) * tokens / text_bytes if text_bytes else math.nan
    return mean, bits_per_byte


def write_samples(
    built: BuiltModel, tokenizer: PreTrainedTokenizerBase, config: Config, process: Process, step: int
) -> list[tuple[str, str]]:
    """Completes the prompts of `validation.prompts`, adds them to `samples.jsonl`, and returns (prompt, text)."""
    settings = config.validation
    samples = []
    for prompt in settings.prompts:
        text = generate_text(
            built.model, tokenizer, prompt, settings.max_new_tokens, settings.temperature, config.training.seed
        )
        samples.append((prompt, text))
    if process.is_first and samples:
        with open(os.path.join(str(config.job.dump_folder), "samples.jsonl"), "a") as file:
            for prompt, text in samples:
                file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
    return samples
