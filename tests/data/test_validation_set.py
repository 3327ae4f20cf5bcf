"""Validation sees every token of its set once, on any number of ranks."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lacuna.config import Config
from lacuna.config.documents import DataConfig, ValidationConfig
from lacuna.config.sections import TrainingConfig
from lacuna.data import Batch, BatchSizes, build_validation
from lacuna.data.packing import IGNORED
from texts import END, write_lines

TEXTS = [f"held out {n} " + "z" * (n * 5 % 60) for n in range(45)]


def batches(
    path: Path, tokenizer: PreTrainedTokenizerFast, world: int, streaming: bool, steps: int = -1
) -> list[list[Batch]]:
    config = Config(
        data=DataConfig(streaming=streaming),
        validation=ValidationConfig(dataset=str(path), steps=steps),
        training=TrainingConfig(seq_len=64),
    )
    ranks = []
    for rank in range(world):
        validation = build_validation(config, tokenizer, BatchSizes(2, 3, 6 * world), rank)
        ranks.append(list(validation()))
        assert all(map(same, ranks[-1], validation())), "every pass is the same"
    return ranks


def same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.columns["input_ids"], other.columns["input_ids"]) and torch.equal(
        one.columns["labels"], other.columns["labels"]
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_token_comes_once_and_ranks_go_in_step(
    world: int, streaming: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_lines(tmp_path / "validation.jsonl", TEXTS)
    ranks = batches(path, tokenizer, world, streaming)
    assert len({len(rank) for rank in ranks}) == 1
    documents = [[*tokenizer(text)["input_ids"], END] for text in TEXTS]
    in_order = [batch for group in zip(*ranks, strict=True) for batch in group]
    tokens = torch.cat([batch.columns["input_ids"].flatten() for batch in in_order])
    labels = torch.cat([batch.columns["labels"].flatten() for batch in in_order])
    laid = [token for document in documents for token in document]
    assert tokens[: len(laid)].tolist() == laid
    assert labels[: len(laid)].tolist() == [
        t for document in documents for t in (*document[1:], IGNORED)
    ]
    assert (labels[len(laid) :] == IGNORED).all()
    assert sum(batch.counts["tokens"] for batch in in_order) == len(laid)
    assert sum(batch.counts["trained_tokens"] for batch in in_order) == len(laid) - len(documents)
    assert sum(batch.counts["text_bytes"] for batch in in_order) == pytest.approx(
        sum(map(len, TEXTS))
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_steps_limit_the_batches(
    streaming: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_lines(tmp_path / "validation.jsonl", TEXTS)
    assert [len(rank) for rank in batches(path, tokenizer, 2, streaming, steps=3)] == [3, 3]
