"""Trains one of fla's models by lacuna and by a plain loop on the same rows, and compares.

python benchmarks/fla_steps.py [MODEL.json] [ROWS_OF_TOKENS]
It needs a GPU and flash-linear-attention. The model is gla_340m.json, rows have 65,536 tokens of
documents of 4,096, weights are float32 and products bfloat16, AdamW is fused. Each program runs in
a process of its own; a line of JSON tells of each: tokens per second, peak memory, losses.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import HashStore
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lacuna.config import Config
from lacuna.config.fields import packaged
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.data import Batch
from lacuna.data.fla_models import register_models
from lacuna.model.build import build_model
from lacuna.model.linear_attention import use_our_softmax_attention
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.mesh import Layout, build_mesh
from lacuna.train.optimizer import build_optimizer, update
from lacuna.train.step import accumulate_gradients

DOCUMENT = 4096
WARM_UP = 4
STEPS = 12
DEVICE = torch.device("cuda", 0)


def row_of(step: int, tokens: int, vocabulary: int) -> Batch:
    """A row of documents of random tokens, the same for both programs."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, vocabulary, (1, tokens), generator=generator)
    positions = torch.arange(tokens)[None] % DOCUMENT
    labels = ids.roll(-1, 1).masked_fill(positions == DOCUMENT - 1, -100)
    bounds = torch.arange(0, tokens + 1, DOCUMENT, dtype=torch.int32)
    columns = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "real": torch.ones_like(ids, dtype=torch.bool),
    }
    trained = int((labels != -100).sum())
    counts = {"tokens": tokens, "trained_tokens": trained, "text_bytes": 0.0, "source_0": tokens}
    return Batch(columns, counts, bounds, DOCUMENT)


def by_lacuna(model: str) -> Callable[[Batch], Tensor]:
    """lacuna's step."""
    register_models(model)
    config = Config(
        model=ModelConfig(config=model),
        training=TrainingConfig(seq_len=DOCUMENT, mixed_precision_param="bfloat16"),
    )
    torch.distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    built = build_model(config, tokenizer_of(model), build_mesh(Layout(), "cuda"), DEVICE)
    optimizer = build_optimizer(built.model, config.optimizer)

    def step(batch: Batch) -> Tensor:
        trained = torch.tensor(batch.counts["trained_tokens"], dtype=torch.float64, device=DEVICE)
        loss, *_ = accumulate_gradients(built, [batch], LanguageModelling.loss, trained)
        update(built, optimizer, trained)
        return loss / trained

    return step


def plainly(model: str) -> Callable[[Batch], Tensor]:
    """A plain loop over fla's model, with autocast and torch's cross-entropy fused as fla does."""
    register_models(model)
    use_our_softmax_attention()
    config = AutoConfig.from_pretrained(model, fuse_cross_entropy=False)
    config.fuse_linear_cross_entropy = True
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE).train()
    settings = Config(model=ModelConfig(config=model)).optimizer
    optimizer = torch.optim.AdamW(
        whole.parameters(),
        settings.lr,
        (settings.beta1, settings.beta2),
        settings.eps,
        settings.weight_decay,
        fused=True,
    )

    def step(batch: Batch) -> Tensor:
        ids, labels = (batch.columns[name].to(DEVICE) for name in ("input_ids", "labels"))
        # fla's own loss shifts labels by itself.
        shifted = F.pad(labels, (1, 0), value=-100)[:, :-1]
        with torch.autocast("cuda", torch.bfloat16):
            bounds = batch.cu_seqlens.to(DEVICE)
            output = whole(ids, labels=shifted, cu_seqlens=bounds, use_cache=False)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return output.loss.detach()

    return step


def tokenizer_of(model: str) -> PreTrainedTokenizerFast:
    """A tokenizer with fewer tokens than the model, which is not asked for any."""
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))


def measure(program: str, model: str, tokens: int) -> None:
    """Runs a program's steps and prints what they took."""
    torch.cuda.set_device(DEVICE)
    step = {"lacuna": by_lacuna, "plain": plainly}[program](model)
    vocabulary = json.loads(Path(model).read_text())["vocab_size"]
    losses = []
    start = 0.0
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        losses.append(step(row_of(number, tokens, vocabulary)))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    measured = {
        "program": program,
        "model": model,
        "gpu": torch.cuda.get_device_name(DEVICE),
        "tokens_per_second": round(STEPS * tokens / seconds),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "first_loss": round(float(losses[0]), 4),
        "last_loss": round(float(losses[-1]), 4),
    }
    print(json.dumps(measured), flush=True)


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--program"]:
        measure(words[1], words[2], int(words[3]))
        return
    model = packaged(words[0] if words else "gla_340m.json")
    tokens = words[1] if len(words) > 1 else "65536"
    for program in ("plain", "lacuna", "plain", "lacuna"):
        command = [sys.executable, __file__, "--program", program, model, tokens]
        subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
