"""A pass before training has every document of the data, however training draws them."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from lacuna.config import Config, UserError
from lacuna.config.documents import DataConfig, PackingConfig, Source
from lacuna.config.sections import TrainingConfig
from lacuna.data import BatchSizes, build_loader
from texts import write_lines


@pytest.mark.parametrize("mode", ["concatenate", "best_fit", "none"])
@pytest.mark.parametrize("weights", [(None, None), (0.9, 0.1), (1.0, 0.0)])
def test_a_pass_has_each_document_once(
    mode: str,
    weights: tuple[float | None, float | None],
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    texts = [[f"first {number}" for number in range(30)], ["second a", "second b"]]
    files = [write_lines(tmp_path / f"{number}.jsonl", one) for number, one in enumerate(texts)]
    sources = tuple(
        Source(dataset=str(file), weight=weight)
        for file, weight in zip(files, weights, strict=True)
    )
    config = Config(
        data=DataConfig(sources=sources, num_workers=0, tokenization="cache"),
        packing=PackingConfig(mode=mode),
        training=TrainingConfig(seq_len=64, seed=7),
    )
    ranks = [build_loader(config, tokenizer, BatchSizes(2, 1, 4), rank) for rank in range(2)]
    batches = [list(loader.every_batch()) for loader in ranks]
    assert len(batches[0]) == len(batches[1])
    rows = [row for batch in sum(batches, []) for row in batch.columns["input_ids"].tolist()]
    ends = tokenizer.eos_token
    found = "".join(tokenizer.decode(row) + ends for row in rows).split(ends)
    seen = sorted(text for text in found if text)
    if mode != "concatenate":
        assert seen == sorted(sum(texts, []))
    counts = [batch.counts["tokens"] for batch in sum(batches, [])]
    assert sum(counts) == sum(len(text) + 1 for text in sum(texts, []))


def test_what_is_tokenised_while_training_has_no_pass(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write_lines(tmp_path / "texts.jsonl", ["a", "b"])
    config = Config(
        data=DataConfig(dataset=str(file), num_workers=0, tokenization="online"),
        training=TrainingConfig(seq_len=64),
    )
    loader = build_loader(config, tokenizer, BatchSizes(2, 1, 2), 0)
    with pytest.raises(UserError, match="needs the cache"):
        next(loader.every_batch())
