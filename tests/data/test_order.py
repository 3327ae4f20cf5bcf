"""Documents come in the order of a column of numbers, or in one that is given, in every pass."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from lacuna.config import Config, UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import CurriculumConfig, DataConfig, PackingConfig, Source
from lacuna.config.sections import TrainingConfig
from lacuna.data import BatchSizes, Loader, build_loader
from lacuna.data.sources import open_source

LEVELS = [5, 3.5, 9, 1, 7, 2, 8, 4, 6, 0]
PACKINGS = {"concatenate": 0, "best_fit": 1, "none": 0}


@pytest.fixture(params=["jsonl", "parquet"])
def leveled(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Documents of 4 to 13 tokens, each of one letter, whose column `level` is not in order."""
    records = [
        {"text": "abcdefghij"[place] * (3 + place), "level": level}
        for place, level in enumerate(LEVELS)
    ]
    path = tmp_path / f"data.{request.param}"
    if request.param == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        datasets.Dataset.from_list(records).to_parquet(path)
    return path


def loader_of(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    packing: str = "none",
    length: int = 16,
    **settings: object,
) -> Loader:
    config = Config(
        data=DataConfig(sources=(Source(dataset=str(path)),), num_workers=0),
        packing=PackingConfig(mode=packing, buffer=PACKINGS[packing] or 16),
        training=TrainingConfig(seq_len=length),
        curriculum=CurriculumConfig(**{"difficulty_column": "level"} | settings),
    )
    return build_loader(config, tokenizer, BatchSizes(1, 1, 1), dp_rank=0)


def letters(loader: Loader, tokenizer: PreTrainedTokenizerFast, rows: int) -> str:
    """The documents of the first rows, a letter each."""
    text = "".join(
        tokenizer.decode(next(loader).columns["input_ids"][0].tolist(), skip_special_tokens=True)
        for _ in range(rows)
    )
    kept = [letter for letter in text if letter in "abcdefghij"]
    return "".join(
        letter for place, letter in enumerate(kept) if place == 0 or kept[place - 1] != letter
    )


IN_ORDER = "".join("abcdefghij"[place] for place in np.argsort(LEVELS))


@pytest.mark.parametrize(("packing", "length"), [("concatenate", 16), ("none", 16), ("none", 8)])
def test_each_pass_goes_from_low_to_high(
    leveled: Path, tokenizer: PreTrainedTokenizerFast, packing: str, length: int
) -> None:
    loader = loader_of(leveled, tokenizer, packing, length)
    assert letters(loader, tokenizer, 2 * loader.plan.rows_per_pass).startswith(IN_ORDER * 2)


def test_only_neighbours_in_the_order_share_rows(
    leveled: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    loader = loader_of(leveled, tokenizer, "best_fit")
    seen = letters(loader, tokenizer, loader.plan.rows_per_pass)
    assert sorted(seen) == sorted(IN_ORDER) and seen != IN_ORDER
    assert max(abs(seen.index(letter) - IN_ORDER.index(letter)) for letter in seen) <= 2


def test_what_was_begun_is_counted_by_the_documents_own_numbers(
    leveled: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    loader = loader_of(leveled, tokenizer)
    letters(loader, tokenizer, 3)
    assert np.flatnonzero(loader.documents_begun()).tolist() == sorted(np.argsort(LEVELS)[:3])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_prompts_do_not_have_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"data.{kind}"
    prompts = datasets.Dataset.from_list([{"prompt": "a", "level": 1}])
    prompts.to_json(path) if kind == "jsonl" else prompts.to_parquet(path)
    source = Source(dataset=str(path))
    with pytest.raises(UserError, match="difficulty_column: no column levl; it has prompt, level"):
        open_source(source, DataConfig(), ChatConfig(), numbers=("levl",), whole=True)


def test_a_column_that_cannot_be_sorted_by_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a", "level": "easy"}\n')
    with pytest.raises(
        UserError, match=r"curriculum\.difficulty_column: no column hard; it has text, level"
    ):
        loader_of(path, tokenizer, difficulty_column="hard")
    datasets.Dataset.from_json(str(path)).to_parquet(tmp_path / "data.parquet")
    for kind in ("jsonl", "parquet"):
        with pytest.raises(UserError, match="easy") as error:
            loader_of(tmp_path / f"data.{kind}", tokenizer)
        assert "curriculum.difficulty_column" in str(error.value)
    (tmp_path / "mixed.jsonl").write_text('{"text": "a", "level": 1}\n')
    config = Config(
        data=DataConfig(
            sources=(Source(dataset=str(tmp_path / "mixed.jsonl"), weight=1),) * 2, num_workers=0
        ),
        curriculum=CurriculumConfig(rank_every=5),
    )
    with pytest.raises(UserError, match="mixed by weight have no common order"):
        build_loader(config, tokenizer, BatchSizes(1, 1, 1), dp_rank=0)
