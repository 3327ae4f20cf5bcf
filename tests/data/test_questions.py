"""Questions are what comes before the last answer; rows made of answers read as they were said."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import DataConfig
from lacuna.data.chat import use_template
from lacuna.data.questions import question_of, read_questions
from lacuna.data.sources import open_source
from texts import tokenizer_of_bytes

CHAT = ChatConfig()


@pytest.fixture(scope="module")
def chatty() -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_of_bytes()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    use_template(tokenizer, ChatConfig(template="chatml"))
    return tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [user("a"), assistant("b")]}, [user("a")]),
        ({"messages": [user("a"), assistant("b"), user("c")]}, None),
        ({"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}, None),
        ({"conversations": [{"from": "human", "value": "a"}]}, [user("a")]),
        ({"prompt": "a"}, [user("a")]),
        ({"prompt": "a", "completion": "b"}, [user("a")]),
        ({"prompt": [user("a")]}, [user("a")]),
        ({"instruction": "a", "input": "b", "output": "c"}, [user("a\n\nb")]),
        ({"instruction": "a"}, [user("a")]),
    ],
)
def test_a_question_is_what_comes_before_the_last_answer(row, messages, chatty) -> None:
    messages = messages or [user("a"), assistant("b"), user("c")]
    question = question_of(row, "row 1", CHAT, chatty)
    assert question.chat.messages == messages
    assert question.row == row
    assert question.text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_tools_are_shown_and_kept(chatty) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    question = question_of({"prompt": "a", "tools": [tool]}, "row 1", CHAT, chatty)
    assert "look" in question.text
    row, _ = question.answered("b")
    assert row == {"messages": [user("a"), assistant("b")], "tools": [tool]}


@pytest.mark.parametrize("row", [{"text": "a"}, {"messages": [assistant("a")]}, {"messages": []}])
def test_a_row_without_a_question_is_refused(row, chatty) -> None:
    with pytest.raises(UserError, match=r"^row 1: asks nothing: .*chat.columns"):
        question_of(row, "row 1", CHAT, chatty)


@pytest.mark.parametrize("row", [{"prompt": 3}, {"messages": 3}])
def test_a_column_that_is_neither_text_nor_a_conversation_is_named(row, chatty) -> None:
    with pytest.raises(UserError, match=rf"^row 1, column {min(row)}: should be a list, not 3"):
        question_of(row, "row 1", CHAT, chatty)


def test_reasoning_goes_where_the_template_has_it_and_reads_as_it_was_said(chatty) -> None:
    question = question_of({"prompt": "a"}, "row 1", CHAT, chatty)
    said = "<think>\nI look.\n\nOut.\n</think>\n\nIt rains."
    row, answer = question.answered(said)
    reasoned = assistant("It rains.") | {"reasoning_content": "I look.\n\nOut."}
    assert row["messages"] == [user("a"), reasoned]
    assert answer == "It rains."
    again = chatty.apply_chat_template(row["messages"], tokenize=False)
    assert again == f"{question.text}{said}<|im_end|>\n"


def test_without_a_place_for_it_reasoning_stays_in_the_answer(chatty) -> None:
    tokenizer = tokenizer_of_bytes()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    )
    question = question_of({"prompt": "a"}, "row 1", CHAT, tokenizer)
    row, answer = question.answered("Hm.\n</think>\n\nNo.")  # the template has begun the reasoning
    assert row["messages"][-1] == assistant("<think>\nHm.\n</think>\n\nNo.")
    assert answer == "No."


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_come_whole(form: str, tmp_path: Path, chatty) -> None:
    rows = [{"prompt": f"{number}?", "wanted": number, "source": "x"} for number in range(3)]
    file = tmp_path / f"rows.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    data = DataConfig(dataset=str(file))
    [source] = data.resolved_sources()
    opened = open_source(source, data, whole=True)
    questions = read_questions([opened], CHAT, chatty, most_broken=1)
    assert [one.row for one in questions] == rows
