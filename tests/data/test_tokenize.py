"""Tokens are the tokenizer's own, with one end of text."""

import os
import sys
from pathlib import Path

import multiprocess
import numpy as np
import pytest
from datasets import Dataset
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from lacuna.config import UserError
from lacuna.config.sections import ModelConfig
from lacuna.data import tokenize
from lacuna.data.document import Document
from lacuna.data.sources import Documents
from lacuna.data.tokenize import add_broken, document_of
from lacuna.data.tokenizer import (
    grown_tokenizer,
    load_tokenizer,
    tokenize_text,
    tokenizer_fingerprint,
)
from texts import END


def copy_of(tokenizer: PreTrainedTokenizerFast, **settings: object) -> PreTrainedTokenizerFast:
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=backend, **({"eos_token": "<end>"} | settings))


def test_the_end_of_text_is_added_unless_it_is_there(tokenizer: PreTrainedTokenizerFast) -> None:
    plain, ended = (tokenize_text(tokenizer, text) for text in ("ab", "ab<end>"))
    assert plain.tolist() == ended.tolist() == [*tokenizer("ab")["input_ids"], END]


def test_without_an_end_of_text_nothing_is_added(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenize_text(copy_of(tokenizer, eos_token=None), "ab")) == 2


def test_a_beginning_is_added_only_by_the_post_processor(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with_begin = copy_of(tokenizer, bos_token="<begin>")
    begin = with_begin.bos_token_id
    assert begin not in tokenize_text(with_begin, "ab")
    with_begin.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", begin)]
    )
    assert tokenize_text(with_begin, "ab").tolist() == [begin, *tokenizer("ab")["input_ids"], END]


def test_a_tokenizer_that_is_set_to_truncate_does_not(tokenizer: PreTrainedTokenizerFast) -> None:
    short = copy_of(tokenizer)
    short.backend_tokenizer.enable_truncation(4)
    assert len(tokenize_text(short, "a" * 100)) == 101


def test_the_fingerprint_tells_tokenizers_apart_but_not_their_uses(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(
        ["a", "bcd"],
        padding="longest" if tokenizer.pad_token else False,
        truncation=True,
        max_length=2,
    )
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(copy_of(tokenizer, eos_token=None)) != before
    assert tokenizer_fingerprint(copy_of(tokenizer, split_special_tokens=True)) != before


def test_documents_count_utf8_bytes_and_empty_or_broken_ones_have_no_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    def document(text: object) -> Document:
        return document_of({"text": text}, 1, Documents("lines", None, "text"), tokenizer)

    assert document("äb").text_bytes == 3 and document("äb").broken is None
    assert len(document("").tokens) == 0 and document("").broken is None
    for broken in (None, 7):
        assert len(document(broken).tokens) == 0 and document(broken).broken == "lines, row 2"


def test_broken_records_are_counted_once_told_at_each_power_of_ten_and_limited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known: dict[str, None] = {}
    for places in ([], ["one"], ["one"], ["two", "one"]):
        add_broken(known, places, limit=2)
    assert len(caplog.records) == 1 and "left out, 1 so far: one" in caplog.text
    many: dict[str, None] = {}
    for number in range(150):
        add_broken(many, [f"line {number}"], limit=150)
    told = [record.getMessage() for record in caplog.records[1:]]
    assert ["10 so far" in told[1], "100 so far" in told[2], len(told)] == [True, True, 3]
    with pytest.raises(
        UserError, match="more than 2 unreadable records, the first: one; two; three;"
    ):
        add_broken(known, ["three"], limit=2)


def test_tokens_that_came_ready_made_are_checked(tokenizer: PreTrainedTokenizerFast) -> None:
    def document(tokens: list[int]) -> Document:
        source = Documents("tokens", None, "input_ids")
        return document_of({"input_ids": tokens}, 1, source, tokenizer)

    ready = document([1, 2])
    assert ready.tokens.tolist() == [1, 2] and np.isnan(ready.text_bytes)
    for tokens, wrong in (([1, 300], 300), ([-1, 2], -1)):
        with pytest.raises(UserError, match=f"row 2: holds token {wrong}, .*none beyond 256"):
            document(tokens)


def test_the_built_in_tokenizer_is_trained_once_and_keeps_every_byte() -> None:
    tokenizer = load_tokenizer("python-stdlib")
    assert len(tokenizer) == 4096 and tokenizer.eos_token == "<|endoftext|>" == tokenizer.pad_token
    text = "def naïve(x):\n\treturn '日本' # 😀\r\n"
    tokens = tokenize_text(tokenizer, text).tolist()
    assert tokenizer.decode(tokens[:-1]) == text and tokens[-1] == tokenizer.eos_token_id
    assert load_tokenizer("python-stdlib").get_vocab() == tokenizer.get_vocab()


def test_an_unknown_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "nowhere"), "nobody/has-this-tokenizer"):
        with pytest.raises(UserError, match="model.tokenizer_path"):
            load_tokenizer(name)


def with_new(folder: Path, *new: str) -> PreTrainedTokenizerFast:
    return grown_tokenizer(ModelConfig(tokenizer_path=str(folder), new_tokens=new))


def test_new_tokens_are_single_and_special_and_those_that_exist_are_not_added_again(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    once = with_new(tmp_path, "<think>", "<end>", "</think>", "<think>", "a")
    first = len(tokenizer)
    assert len(once) == first + 2
    a, b = tokenizer("ab").input_ids
    ids = once("a<think>b</think>").input_ids
    assert ids == [a, first, b, first + 1]
    assert once.decode(ids, skip_special_tokens=True) == "ab"
    once.save_pretrained(tmp_path / "saved")
    again = with_new(tmp_path / "saved", "</think>", "<think>")
    assert again.get_vocab() == once.get_vocab() and again("a<think>b</think>").input_ids == ids
    assert tokenizer_fingerprint(once) != tokenizer_fingerprint(tokenizer)


def test_a_new_token_that_is_not_one_token_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    for token in ("", " ", "\n\t"):
        with pytest.raises(
            UserError, match=r"model\.new_tokens: .* must be one token, and more than white space"
        ):
            with_new(tmp_path, "<think>", token)
    with pytest.raises(
        UserError, match=r"model\.new_tokens: 'Ġ' becomes \[\d+, \d+\].* must be one token"
    ):
        with_new(tmp_path, "Ġ")  # how the vocabulary writes a space


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is Python's choice")
def test_those_that_tokenise_are_forked_whatever_python_would_do(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is forked ends with a killed run; what Python 3.14's server starts does not."""

    def noted(*given: object) -> Document:
        (tmp_path / str(os.getppid())).touch()
        return document_of(*given)

    monkeypatch.setattr(tokenize, "document_of", noted)
    monkeypatch.setattr(tokenize, "_BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(tokenize, "usable_cores", lambda: 2)
    before = multiprocess.get_start_method(allow_none=True)
    multiprocess.set_start_method("forkserver", force=True)
    try:
        rows = Dataset.from_dict({"text": ["ab"] * 8})
        tokenize._tokenise_source(Documents("rows", rows, "text"), tokenizer, "forked")
        assert multiprocess.get_start_method() == "forkserver"
    finally:
        multiprocess.set_start_method(before, force=True)
    assert [file.name for file in tmp_path.iterdir()] == [str(os.getpid())]
