"""Conversations come out of every file as they were written."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Json, List, Value
from test_chat import HI, prepared
from test_template import AS_JSON

from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import DataConfig, Source
from lacuna.data.sources import open_source
from lacuna.data.tokenize import document_of


def talk(arguments: Any) -> dict[str, Any]:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }
    return {"messages": [HI | {"tool_calls": None}, called], "tools": [{"function": {"name": "f"}}]}


TALKS = [talk({"at": "Graz", "unit": None}), talk({"days": 2})]


def texts(path: Path, streaming: bool = False) -> list[str]:
    settings = DataConfig(streaming=streaming)
    documents = open_source(Source(dataset=str(path)), settings, ChatConfig())
    tokenizer = prepared(AS_JSON)
    found = [
        document_of(record, number, documents, tokenizer).tokens
        for number, record in enumerate(documents.dataset)
    ]
    return [tokenizer.decode(tokens) for tokens in found]


def written(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    if path.suffix == ".parquet":
        Dataset.from_list(rows, **settings).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("streaming", [False, True])
def test_nulls_of_a_record_are_kept_and_those_of_a_table_are_not(
    streaming: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = texts(written(tmp_path / "talks.jsonl", TALKS), streaming)
    assert 'f{"at": "Graz", "unit": null}<' in kept[0] and 'f{"days": 2}<' in kept[1]
    as_text = [talk(json.dumps({"at": None})), talk("{}")]
    assert 'f{"at": null}<' in texts(written(tmp_path / "text.parquet", as_text), streaming)[0]
    call = {"function": {"name": Value("string"), "arguments": Json()}}
    message = {"role": Value("string"), "content": Value("string"), "tool_calls": List(call)}
    exact = Features(
        {"messages": List(message), "tools": List({"function": {"name": Value("string")}})}
    )
    assert texts(written(tmp_path / "exact.parquet", TALKS, features=exact), streaming) == kept
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="lacuna"):
        filled = texts(written(tmp_path / "filled.parquet", TALKS), streaming)
    assert 'f{"at": "Graz"}<' in filled[0] and 'f{"days": 2}<' in filled[1]
    assert (
        len(caplog.records) == 1
        and "filled.parquet" in caplog.text
        and "null arguments of tool" in caplog.text
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "Yes", "tool_calls": "[]"},
        {"role": "assistant", "content": "Yes", "tool_calls": []},
        {"role": "assistant", "content": "Yes", "tool_calls": None, "name": None},
    ],
)
def test_no_calls_are_none_however_they_are_written(
    message: dict[str, Any], tmp_path: Path
) -> None:
    path = written(
        tmp_path / "talks.jsonl",
        [{"messages": [HI, message], "tools": [{"function": {"name": "f"}}]}],
    )
    assert texts(path)[0].endswith("Yes<|im_end|>\n")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_text_in_parts_is_the_text(ending: str, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "Yes"}
    rows = [
        [HI, answer],
        [one | {"content": [{"type": "text", "text": one["content"]}]} for one in (HI, answer)],
    ]
    given = [{"messages": row, "tools": [{"function": {"name": "f"}}]} for row in rows]
    plain, parts = (
        texts(written(tmp_path / f"{number}.{ending}", [row])) for number, row in enumerate(given)
    )
    assert plain == parts
    if ending == "jsonl":  # tables have one type
        assert texts(written(tmp_path / "mixed.jsonl", given)) == [*plain, *parts]
