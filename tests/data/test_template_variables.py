"""What a row has for its chat template, in TRL's column chat_template_kwargs, reaches it."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from test_chat import HI, PLAIN, YES, prepared, whole_text
from test_preferences import NO, pair

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import DataConfig, Source
from lacuna.data.chat import encode
from lacuna.data.prompts import prompt_document
from lacuna.data.questions import question_of
from lacuna.data.sources import open_source
from lacuna.data.tokenize import document_of

MOOD = "{{- '<|im_start|>' + (mood or 'calm') + '<|im_end|>' }}" + PLAIN
GIVEN = {"chat_template_kwargs": {"mood": "merry"}}


@pytest.mark.parametrize("given", [GIVEN, {"chat_template_kwargs": '{"mood": "merry"}'}])
def test_a_conversation_is_written_with_what_its_row_gives_the_template(given: Any) -> None:
    tokenizer = prepared(MOOD)
    row = {"messages": [HI, YES]}
    for more, mood in (({}, "calm"), ({"chat_template_kwargs": {}}, "calm"), (given, "merry")):
        document = encode(row | more, "", tokenizer, ChatConfig())
        assert whole_text(document, tokenizer).startswith(f"<|im_start|>{mood}<|im_end|>")
        question = question_of(row | more, "", ChatConfig(), tokenizer)
        assert question.text.startswith(f"<|im_start|>{mood}<|im_end|>")
    answered = question.answered("Yes")[0]
    assert whole_text(encode(answered, "", tokenizer, ChatConfig()), tokenizer) == whole_text(
        document, tokenizer
    )


def test_both_answers_of_a_pair_are_written_with_it() -> None:
    tokenizer = prepared(MOOD)
    document = pair({"prompt": [HI], "chosen": [YES], "rejected": [NO]} | GIVEN, tokenizer)
    assert whole_text(document, tokenizer).count("<|im_start|>merry") == 2


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_it_is_read_from_files(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"talks.{ending}"
    row = {"messages": [HI, YES]} | GIVEN
    if ending == "jsonl":
        path.write_text(json.dumps(row))
    else:
        Dataset.from_list([row]).to_parquet(path)
    documents = open_source(Source(dataset=str(path)), DataConfig(), ChatConfig())
    tokenizer = prepared(MOOD)
    document = document_of(documents.dataset[0], 0, documents, tokenizer)
    assert "merry" in whole_text(document, tokenizer)


def test_names_that_the_conversation_itself_has_are_refused() -> None:
    tokenizer = prepared(MOOD)
    row = {"messages": [HI, YES], "chat_template_kwargs": {"tools": [], "mood": "merry"}}
    with pytest.raises(UserError, match="row 7, column chat_template_kwargs: tools is given"):
        encode(row, "talks, row 7", tokenizer, ChatConfig())


def test_completions_of_several_turns_whose_replies_would_lack_it_are_refused() -> None:
    tokenizer = prepared(MOOD)
    with pytest.raises(UserError, match="row 7, column chat_template_kwargs: .*several turns"):
        prompt_document({"prompt": [HI]} | GIVEN, "talks, row 7", tokenizer, ChatConfig(), [])
