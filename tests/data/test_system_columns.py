"""A system prompt in a column of its own is the first message; what is not read is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from test_chat import HI, YES, shipped, whole_text
from test_preferences import NO, pair

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import DataConfig, Source
from lacuna.data.chat import encode
from lacuna.data.prompts import prompt_document
from lacuna.data.questions import question_of
from lacuna.data.sources import open_source
from lacuna.data.tokenize import document_of

KIND = {"role": "system", "content": "Be kind."}
ROWS: list[dict[str, Any]] = [
    {"messages": [HI, YES]},
    {"prompt": [HI], "completion": [YES]},
    {"instruction": "Hi", "input": "", "output": "Yes", "history": []},
]


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize("row", ROWS)
def test_a_system_prompt_in_its_own_column_is_the_first_message(
    row: dict[str, Any], column: str
) -> None:
    tokenizer = shipped("chatml")
    text = whole_text(encode({"messages": [KIND, HI, YES]}, "", tokenizer, ChatConfig()), tokenizer)
    found = encode(row | {column: "Be kind."}, "", tokenizer, ChatConfig())
    assert whole_text(found, tokenizer) == text
    for empty in ("", None, " "):
        found = encode(row | {column: empty}, "", tokenizer, ChatConfig())
        assert "system" not in whole_text(found, tokenizer)
    question = question_of(row | {column: "Be kind."}, "", ChatConfig(), tokenizer)
    assert question.chat.messages == [KIND, HI]


def test_a_conversation_with_a_system_prompt_keeps_it() -> None:
    tokenizer = shipped("chatml")
    row = {"messages": [KIND, HI, YES], "system": "Be brief."}
    assert "brief" not in whole_text(encode(row, "", tokenizer, ChatConfig()), tokenizer)


def test_the_column_may_have_another_name() -> None:
    tokenizer = shipped("chatml")
    row = {"messages": [HI, YES], "rules": "Be kind."}
    settings = ChatConfig(columns=("system=rules",))
    assert "Be kind." in whole_text(encode(row, "", tokenizer, settings), tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [HI], "chosen": [YES], "rejected": [NO]},
        {"prompt": "Hi", "chosen": [HI, YES], "rejected": [HI, NO]},
        {"chosen": [HI, YES], "rejected": [HI, NO]},
        {"messages": [HI], "chosen": "Yes", "rejected": "No"},
    ],
)
def test_both_answers_of_a_pair_come_behind_it(row: dict[str, Any]) -> None:
    tokenizer = shipped("chatml")
    told = {"prompt": [KIND, HI], "chosen": [YES], "rejected": [NO]}
    found = pair(row | {"system": "Be kind."}, tokenizer)
    assert found.tokens.tolist() == pair(told, tokenizer).tokens.tolist()


def test_texts_which_have_no_place_for_it_are_refused() -> None:
    tokenizer = shipped("chatml")
    mend = "write it into the prompt, give the prompt as messages, or leave the column out"
    texts = {"prompt": "Hi", "completion": "Yes", "system": "Be kind."}
    with pytest.raises(UserError, match=f"data, row 2, column system: .*{mend}"):
        encode(texts, "data, row 2", tokenizer, ChatConfig())
    with pytest.raises(UserError, match=mend):
        prompt_document(texts, "data, row 2", tokenizer, ChatConfig())
    with pytest.raises(UserError, match=mend):
        pair({"prompt": "Hi", "chosen": "Yes", "rejected": "No", "system": "Kind."}, tokenizer)


@pytest.mark.parametrize("history", [[["Hello", "Hi"]], '[["Hello", "Hi"]]'])
def test_earlier_turns_in_a_column_of_their_own_are_refused(history: Any) -> None:
    tokenizer = shipped("chatml")
    row = {"instruction": "Hi", "input": "", "output": "Yes", "history": history}
    with pytest.raises(UserError, match="data, row 2, column history: .*give all turns as message"):
        encode(row, "data, row 2", tokenizer, ChatConfig())
    with pytest.raises(UserError, match="column history"):
        question_of(row, "data, row 2", ChatConfig(), tokenizer)
    answers = {"prompt": [HI], "chosen": [YES], "rejected": [NO], "history": history}
    with pytest.raises(UserError, match="column history"):
        pair(answers, tokenizer)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_column_is_read_from_files(ending: str, tmp_path: Path) -> None:
    row = {"conversations": [HI, YES], "system": "Be kind.", "other": 1}
    path = tmp_path / f"talks.{ending}"
    if ending == "jsonl":
        path.write_text(json.dumps(row))
    else:
        Dataset.from_list([row]).to_parquet(path)
    documents = open_source(Source(dataset=str(path)), DataConfig(), ChatConfig())
    tokenizer = shipped("chatml")
    document = document_of(documents.dataset[0], 0, documents, tokenizer)
    assert "Be kind." in whole_text(document, tokenizer)
