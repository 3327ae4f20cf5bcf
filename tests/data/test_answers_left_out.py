"""Answers that the data says are not to be trained are read, and not trained."""

from typing import Any

import pytest
from test_chat import BYE, HI, LAST, MARKED, PLAIN, YES, answers, prepared, shipped
from test_preferences import NO, pair
from transformers import PreTrainedTokenizerFast

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.data.chat import encode

LONG = {"role": "assistant", "content": "So long"}
LEFT_OUT = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}]
END = "<|im_end|>"


@pytest.fixture(scope="module", params=["unmarked", "marked", "chatml"])
def chatty(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """A tokenizer whose template marks answers, or does not."""
    if request.param == "chatml":
        return shipped("chatml")
    return prepared(MARKED if request.param == "marked" else PLAIN)


@pytest.mark.parametrize("mark", LEFT_OUT)
def test_an_answer_that_is_left_out_is_read_wherever_it_stands(
    mark: dict[str, Any], chatty: PreTrainedTokenizerFast
) -> None:
    talk = [HI, YES, BYE, LONG, HI, NO]
    texts = ["Yes", "So long", "No"]
    whole = encode({"messages": talk}, "", chatty, ChatConfig())
    for left_out in ([0], [1], [2], [0, 2], [1, 2]):
        marked = [*talk]
        for number in left_out:
            marked[2 * number + 1] = talk[2 * number + 1] | mark
        found = encode({"messages": marked}, "", chatty, ChatConfig())
        assert found.tokens.tolist() == whole.tokens.tolist()
        kept = [text for number, text in enumerate(texts) if number not in left_out]
        trained = [text.partition(END)[0] for text in answers(chatty, marked)]
        assert trained == kept, left_out


def test_the_last_answer_is_the_last_that_is_trained(chatty: PreTrainedTokenizerFast) -> None:
    talk = [HI, YES, BYE, LONG | {"weight": 0}]
    assert answers(chatty, talk, LAST)[0].startswith("Yes")


def test_answers_marked_as_trained_are(chatty: PreTrainedTokenizerFast) -> None:
    talk = [HI, YES | {"weight": 1}, BYE, LONG | {"train": True, "training": None}]
    assert len(answers(chatty, talk)) == 2


def test_sharegpt_marks_answers_the_same_way(chatty: PreTrainedTokenizerFast) -> None:
    talk = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Bad", "weight": 0},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Yes", "weight": 1},
    ]
    assert [text.partition(END)[0] for text in answers(chatty, talk)] == ["Yes"]


def test_what_trains_nothing_or_says_something_else_is_refused() -> None:
    tokenizer = shipped("chatml")
    nothing = "row 7.*by their weight, train or training no answer is to be trained; leave the row"
    with pytest.raises(UserError, match=nothing):
        answers(tokenizer, [HI, YES | {"weight": 0}])
    with pytest.raises(UserError, match="message 2, weight: should be 0 or 1, not 0.5"):
        answers(tokenizer, [HI, YES | {"weight": 0.5}])
    with pytest.raises(UserError, match="message 2, train: should be true or false, not 'no'"):
        answers(tokenizer, [HI, YES | {"train": "no"}])
    with pytest.raises(UserError, match="no answer is to be trained"):
        pair({"prompt": [HI], "chosen": [YES | {"weight": 0}], "rejected": [NO]}, tokenizer)
