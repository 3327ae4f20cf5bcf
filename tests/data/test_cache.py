"""The cache of tokens: made once whoever asks, and anew for other data or another tokenizer."""

import copy
import json
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
import tokenizers
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from lacuna.config import Config, UserError, logger
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import DataConfig, PackingConfig, Source
from lacuna.config.sections import TrainingConfig
from lacuna.data.cache import fingerprint, made_once
from lacuna.data.document import Span
from lacuna.data.mixture import Mixture, Pool
from lacuna.data.packing import pack
from lacuna.data.plan import RowPlan, make_row_plan
from lacuna.data.rows import open_rows
from lacuna.data.sources import open_source
from lacuna.data.tokenize import TokenTable, token_table
from lacuna.data.tokenizer import load_tokenizer
from texts import END, write_lines

TEXTS = [f"text {n}" * (n % 7) for n in range(2500)]


def table_of(path: Path, tokenizer: PreTrainedTokenizerFast, limit: int = 0) -> TokenTable:
    source = open_source(Source(dataset=str(path)), DataConfig())
    return token_table([source], tokenizer, limit)


def tokens_of(table: TokenTable, index: int) -> list[int]:
    return table.document(index)[0].tokens.tolist()


def test_the_cache_holds_what_the_tokenizer_says(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    table = table_of(write_lines(tmp_path / "texts.jsonl", TEXTS), tokenizer)
    for index in (0, 1, 999, 1000, 2499):
        expected = [*tokenizer(TEXTS[index])["input_ids"], END] if TEXTS[index] else []
        assert tokens_of(table, index) == expected
        assert (table.lengths[index], table.document(index)[0].text_bytes) == (
            len(expected),
            len(TEXTS[index]),
        )
    assert Span(*table.document(1), 2, 5).tokens.tolist() == tokens_of(table, 1)[2:5]


def test_of_many_processes_one_tokenises(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_lines(tmp_path / "shared.jsonl", TEXTS[:50])
    with multiprocessing.get_context("fork").Pool(3) as pool:
        tables = pool.starmap(table_of, [(path, tokenizer)] * 3)
    assert len({str(files_of(table)) for table in tables}) == 1
    assert all(tokens_of(table, 1) == tokens_of(tables[0], 1) for table in tables)
    written = [file.stat().st_mtime_ns for file in files_of(tables[0])]
    assert [file.stat().st_mtime_ns for file in files_of(table_of(path, tokenizer))] == written


def files_of(table: TokenTable) -> list[Path]:
    return [Path(file["filename"]) for file in table.dataset.cache_files]


def test_half_a_cache_is_made_again(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "killed.jsonl", TEXTS[:50])
    [file] = files_of(table_of(path, tokenizer))
    file.rename(file.with_name("tmp_half"))
    file.with_name("tmp_half").write_bytes(b"half")
    assert tokens_of(table_of(path, tokenizer), 1) == [*tokenizer(TEXTS[1])["input_ids"], END]


def test_ready_made_tokens_are_taken_as_they_are(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    documents = [[1, 2, 3], [], None, [4], [5, 6]]
    Dataset.from_dict({"input_ids": documents}).to_parquet(tmp_path / "tokens.parquet")
    table = table_of(tmp_path / "tokens.parquet", tokenizer, limit=1)
    assert table.lengths.tolist() == [3, 0, 0, 1, 2] and tokens_of(table, 4) == [5, 6]
    assert np.isnan(table.document(0)[0].text_bytes)
    with pytest.raises(UserError, match="row 3"):
        table_of(tmp_path / "tokens.parquet", tokenizer, limit=0)


def test_special_tokens_that_a_template_is_given_are_not_taken_from_an_older_cache(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "chats.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": talk}) + "\n")
    source = open_source(Source(dataset=str(path)), DataConfig(), ChatConfig())
    said = "{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
    found = []
    for first in ("<one>", "<two>"):
        own = copy.deepcopy(tokenizer)
        own.add_tokens(["<one>", "<two>", "<|end|>"], special_tokens=True)
        own.bos_token = first
        own.chat_template = (
            "{{ bos_token }}{% for m in messages %}"
            + said
            + "<|end|>{% endgeneration %}{% endif %}{% endfor %}"
        )
        found.append(tokens_of(token_table([source], own, 0), 0)[0])
        assert found[-1] == own.convert_tokens_to_ids(first)
    assert found[0] != found[1]


def test_ids_may_leave_some_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A tokenizer's largest id may be larger than the number of its tokens."""
    vocabulary = {"a": 0, "b": 70_000, "<end>": 70_001}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    sparse = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    table = table_of(write_lines(tmp_path / "lines.jsonl", ["a b"]), sparse, limit=0)
    assert tokens_of(table, 0) == [0, 70_000, 70_001]
    Dataset.from_dict({"input_ids": [[70_000]]}).to_parquet(tmp_path / "tokens.parquet")
    assert tokens_of(table_of(tmp_path / "tokens.parquet", sparse, limit=0), 0) == [70_000]
    Dataset.from_dict({"input_ids": [[70_002]]}).to_parquet(tmp_path / "beyond.parquet")
    with pytest.raises(UserError, match="holds token 70002, and the tokenizer has none beyond"):
        table_of(tmp_path / "beyond.parquet", sparse, limit=0)


def test_broken_records_are_remembered_with_the_cache(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_lines(tmp_path / "lines.jsonl", TEXTS[:5])
    path.write_text(path.read_text() + "nonsense\n{}\n")
    for _ in range(2):
        assert table_of(path, tokenizer, limit=2).lengths.tolist()[-2:] == [0, 0]
        with pytest.raises(UserError, match=r"lines.jsonl:6.*lines.jsonl:7"):
            table_of(path, tokenizer, limit=1)


def test_rows_are_slices_of_all_documents_laid_end_to_end(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    table = table_of(write_lines(tmp_path / "rows.jsonl", TEXTS[:40]), tokenizer)
    order = Mixture(0, (Pool(40, key=None),), (1.0,), lanes=1)
    config = Config(training=TrainingConfig(seq_len=50))
    plan = RowPlan(config.row_form, config.data, tokenizer, order, (), table)
    laid = [token for index in range(40) for token in tokens_of(table, index)] * 3
    for row in (open_rows(made, {}, []) for made in (plan, pickle.loads(pickle.dumps(plan)))):
        for number in (0, 1, 3, 25):
            tokens = np.concatenate([span.tokens for span in row(number)])
            assert tokens.tolist() == laid[number * 50 : number * 50 + 50]
        assert pack([row(30)], plan.form, sources=1, padding=END).counts["text_bytes"] < 50


def test_the_documents_of_several_sources_stand_behind_each_other(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    paths = [
        write_lines(tmp_path / f"{number}.jsonl", TEXTS[number : 3 * number]) for number in (1, 3)
    ]
    sources = [open_source(Source(dataset=str(path)), DataConfig()) for path in paths]
    table = token_table(sources, tokenizer, most_broken=0)
    found = [table.document(index) for index in range(8)]
    assert [source for _, source in found] == [0] * 2 + [1] * 6
    assert [len(document.tokens) for document, _ in found] == [
        len(TEXTS[n]) + 1 if TEXTS[n] else 0 for n in (1, 2, *range(3, 9))
    ]


def test_rows_are_fitted_once_for_each_length_and_nothing_is_tokenised_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    paths = [
        write_lines(tmp_path / f"{number}.jsonl", TEXTS[number : 20 * number]) for number in (1, 3)
    ]
    settings = [Source(dataset=str(path)) for path in paths]

    def rows(seq_len: int, mode: str = "best_fit") -> list[list[list[int]]]:
        config = Config(training=TrainingConfig(seq_len=seq_len), packing=PackingConfig(mode=mode))
        return [
            pieces.tolist() for pieces in make_row_plan(config, tokenizer, settings, lanes=1).bins
        ]

    def written() -> dict[Path, int]:
        return {
            file: file.stat().st_mtime_ns
            for kind in ("npz", "arrow")
            for file in tmp_path.rglob(f"*.{kind}")
        }

    first = rows(50)
    before = written()
    assert rows(50) == first and written() == before
    assert rows(30) != first and rows(50, "none") != first and rows(50) == first
    after = written()
    assert before.items() < after.items()
    assert {file.suffix for file in after.keys() - before.keys()} == {".npz"}
    assert len(after) == len(before) + 2


@pytest.mark.parametrize("place", ["/sys", "a file"])
def test_a_cache_that_cannot_be_written_to_is_one_message(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "a file").write_text("")
    cache = place if place == "/sys" else str(tmp_path / place)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    source = Source(dataset=str(write_lines(tmp_path / "texts.jsonl", TEXTS)))
    with pytest.raises(
        UserError,
        match=f"tokens, {cache}, cannot be written to: .*; set the env.*HF_DATASETS_CACHE",
    ):
        make_row_plan(Config(), tokenizer, [source], lanes=1)
    with pytest.raises(UserError, match="cannot be written to"):
        load_tokenizer("python-stdlib")


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def zeroed(content: bytes) -> bytes:
    return content[:4096] + bytes(4096) + content[8192:]


def other(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize("damaged", [truncated, zeroed, other])
def test_a_damaged_cache_is_made_anew_with_a_line_that_says_so(
    damaged: Callable[[bytes], bytes],
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "caches")
    path = write_lines(tmp_path / "texts.jsonl", TEXTS)
    expected = table_of(path, tokenizer).dataset.to_dict()
    (file,) = (tmp_path / "caches").rglob("tokens*.arrow")
    file.write_bytes(damaged(file.read_bytes()))
    monkeypatch.setattr(logger, "propagate", True)
    assert table_of(path, tokenizer).dataset.to_dict() == expected
    assert [record.message for record in caplog.records if "made anew" in record.message] == [
        f"the cache {file.parent} is damaged (not as it was written: {file.name}): it is made anew"
    ]
    caplog.clear()
    table_of(path, tokenizer)
    assert not [record for record in caplog.records if "made anew" in record.message]


def test_what_a_cache_holds_is_known_by_its_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    made: list[str] = []

    def write(file: str) -> None:
        made.append(file)
        Path(file).write_text("content")

    kept = made_once("entry", write)
    assert made_once("entry", write) == kept and len(made) == 1
    kept.with_name("entry.sums").unlink()
    assert made_once("entry", write).read_text() == "content" and len(made) == 2


def test_a_fingerprint_is_of_contents_and_cheap(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    content = bytearray(range(256)) * 20_000  # 5 blocks, the last of which is not whole
    first.write_bytes(content)
    second.write_bytes(content)
    assert fingerprint([first]) == fingerprint([second])
    whole, parts = fingerprint([first]), fingerprint([first], 2**21)
    content[2 * 2**20] ^= 1
    second.write_bytes(content)
    assert fingerprint([second]) != whole and fingerprint([second], 2**21) == parts, (
        "all of it was read"
    )
    content[-1] ^= 1
    second.write_bytes(content)
    assert fingerprint([second], 2**21) != parts
