"""What a run must come to, computed with transformers and torch alone.

There is no packing here, no sharding, and nothing of lacuna.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

Piece = tuple[list[int], list[int]]
"""Tokens of one document in one row, and what each but perhaps the last predicts."""


def texts_of(path: Path) -> list[str]:
    """The documents of a file of JSON lines."""
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def rows_of(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[list[Piece]]:
    """Lays the documents end to end, each followed by the end token, in rows of `length` tokens.

    The last row is shorter.
    """
    row: list[Piece] = []
    space = length
    for text in texts:
        tokens = tokenizer(text).input_ids + [tokenizer.eos_token_id]
        while tokens:
            piece, tokens = tokens[:space], tokens[space:]
            row.append((piece, piece[1:] + tokens[:1]))
            space -= len(piece)
            if space == 0:
                yield row
                row, space = [], length
    if row:
        yield row


def loss_of(model: PreTrainedModel, rows: Iterable[list[Piece]]) -> Tensor:
    """The mean loss over all predicted tokens; each document is computed by itself."""
    total, count = torch.zeros(()), 0
    for tokens, targets in (piece for row in rows for piece in row if piece[1]):
        logits = model(torch.tensor([tokens])).logits[0, : len(targets)]
        total = total + cross_entropy(logits, torch.tensor(targets), reduction="sum")
        count += len(targets)
    return total / count


def train_plainly(
    model: LlamaForCausalLM, batches: Iterable[list[list[Piece]]], rates: Iterable[float]
) -> list[tuple[float, float]]:
    """Trains `model` in place with lacuna's default optimizer.

    Returns (loss, gradient norm) of each step.
    """
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    others = [
        weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)
    ]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for batch, rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps
