"""What a template leaves out is said; all that it writes to close an answer is trained."""

from typing import Any

import numpy as np
import pytest
from test_chat import (
    BYE,
    CALL,
    HI,
    LAST,
    MARKED,
    PLAIN,
    TALK,
    WEATHER,
    YES,
    answers,
    prepared,
    shipped,
    tokenizer_with,
)

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.data.chat import encode, end_of_turn, use_template
from lacuna.data.document import Document

THOUGHTFUL = YES | {"reasoning_content": "Easy."}
LATER = TALK[3] | {"reasoning_content": "Hm."}
TWO_ENDS = PLAIN.replace(
    "'<|im_end|>\\n'", "('<|eot_id|><|im_end|>' if message.role == 'assistant' else '<|im_end|>')"
)
CLOSED = "{%- if not add_generation_prompt %}{{- '<|im_end|>' }}{% endif %}"
# Asks for reasoning, and writes it in the last turn only.
THINKS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last and message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}"""
CALLS = """\
{%- for tool in tools %}{{- tool.function.name }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{- call.function.name }}ARGUMENTS{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
AS_JSON = CALLS.replace("ARGUMENTS", "{{- call.function.arguments | tojson }}")


def call(**arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    "template, end",
    [
        (PLAIN, "<|im_end|>"),
        (PLAIN.replace("<|im_end|>\\n", "<|eot_id|>"), "<|eot_id|>"),
        (PLAIN.replace("'<|im_end|>\\n'", "eos_token"), "<end>"),
        (TWO_ENDS, "<|eot_id|><|im_end|>"),
        (TWO_ENDS.replace("<|eot_id|><", "<|eot_id|>\\n<"), "<|eot_id|>\n<|im_end|>"),
        (PLAIN.replace("'<|im_end|>", "'\\n<|im_end|>"), "\n<|im_end|>"),
        (PLAIN.replace("'<|im_end|>", "'\\n<|im_end|>") + CLOSED, "\n<|im_end|>"),
        (PLAIN.replace("'<|im_end|>\\n'", "'</answer><|im_end|>'"), "</answer><|im_end|>"),
        (
            TWO_ENDS.replace("{%- if add_generation_prompt %}", "{%- if true %}"),
            "<|eot_id|><|im_end|>",
        ),
        (MARKED.replace("'<|im_end|>", "'<|eot_id|><|im_end|>"), "<|eot_id|><|im_end|>"),
        (
            MARKED.replace("content }}{% endg", "content + '<|eot_id|>' }}{% endg"),
            "<|eot_id|><|im_end|>",
        ),
        (MARKED.replace("'<|im_end|>", "'\\n<|im_end|>"), "\n<|im_end|>"),
        (
            MARKED.replace("content }}{% endg", "content + '\\n<|im_end|>\\n' }}{% endg"),
            "\n<|im_end|>\n",
        ),
    ],
    ids=[
        "newline after",
        "none after",
        "end of text",
        "two",
        "two lines",
        "newlines around",
        "again at the end",
        "text before",
        "always asks",
        "two unmarked",
        "one of two marked",
        "newline unmarked",
        "twice",
    ],
)
def test_the_whole_end_of_an_answer_is_trained_and_no_more(template: str, end: str) -> None:
    for eos in ("<end>", "<|im_end|>"):
        tokenizer = prepared(template, eos_token=eos)
        written = end.replace("<end>", eos)
        assert answers(tokenizer, TALK) == [f"Yes{written}", f"So long{written}"]
        assert answers(tokenizer, TALK, LAST) == [f"So long{written}"]
        last = written.strip()[written.strip().rindex("<") :]
        assert end_of_turn(tokenizer) == [
            *dict.fromkeys(tokenizer.convert_tokens_to_ids([eos, last]))
        ]


def test_reasoning_is_trained_where_the_template_writes_it_and_refused_by_name_where_not() -> None:
    shown = prepared(THINKS)
    assert answers(shown, [HI, THOUGHTFUL]) == ["Easy.\n</think>\n\nYes<|im_end|>"]
    assert answers(shown, [HI, THOUGHTFUL, BYE, LATER], LAST) == [
        "Hm.\n</think>\n\nSo long<|im_end|>"
    ]
    assert answers(shipped("chatml"), [HI, THOUGHTFUL]) == [
        "<think>\nEasy.\n</think>\n\nYes<|im_end|>"
    ]
    with pytest.raises(
        UserError, match=r'write reasoning_content of message 2; set .*, or chat.train_on = "last"'
    ):
        answers(shown, [HI, THOUGHTFUL, BYE, LATER])
    for key in ("reasoning_content", "reasoning", "thinking"):
        with pytest.raises(
            UserError, match=f"row 7, column messages: .* does not write {key} of message 2; set"
        ):
            answers(prepared(PLAIN), [HI, YES | {key: "Easy."}])


def test_reasoning_within_an_answer_is_not_cut_off_in_silence() -> None:
    strips = prepared(PLAIN.replace("message.content", "message.content.split('</think>')[-1]"))
    assert answers(strips, [HI, YES]) == ["Yes<|im_end|>"]
    inline = YES | {"content": "<think>Easy.</think>Yes"}
    assert answers(prepared(PLAIN), [HI, inline]) == ["<think>Easy.</think>Yes<|im_end|>"]
    with pytest.raises(
        UserError, match="the chat template does not write content of message 2; set chat.template"
    ):
        answers(strips, [HI, inline])
    assert answers(strips, [HI, inline, *TALK[2:]], LAST) == ["So long<|im_end|>"], (
        "as the model will be asked"
    )


@pytest.mark.parametrize(
    "template, row, lost",
    [
        (
            PLAIN.replace(
                "message.content", "('' if message.role == 'system' else message.content)"
            ),
            {"messages": [{"role": "system", "content": "Be kind."}, HI, YES]},
            "content of message 1",
        ),
        (
            AS_JSON.replace(
                "(message.content or '')", "('' if message.tool_calls else message.content)"
            ),
            {"messages": [HI, CALL | {"content": "I look."}], "tools": [WEATHER]},
            "content of message 2",
        ),
        (
            CALLS.replace("ARGUMENTS", ""),
            {"messages": [HI, CALL], "tools": [WEATHER]},
            "tool_calls of message 2",
        ),
        (
            AS_JSON.replace("in tools %}{{- tool.function.name }}", "in tools or [] %}"),
            {"messages": TALK, "tools": [WEATHER]},
            "tools",
        ),
    ],
)
def test_what_a_template_leaves_out_is_named(template: str, row: dict[str, Any], lost: str) -> None:
    with pytest.raises(
        UserError,
        match=f"column messages: the chat template does not write {lost}; set chat.template",
    ):
        answers(prepared(template), **row)


def test_null_arguments_and_defaults_are_kept() -> None:
    asked = {"unit": None, "at": {"place": None}, "days": [None, 1]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"default": None}}}
    tokenizer = prepared(AS_JSON.replace("tool.function.name", "tool | tojson"))
    for arguments in (asked, '{"unit": null, "at": {"place": null}, "days": [null, 1]}'):
        messages = [HI, {"role": "assistant", "content": None, "tool_calls": call()["tool_calls"]}]
        messages[1]["tool_calls"] = [
            {"id": None, "function": {"name": "weather", "arguments": arguments}}
        ]
        wanted = 'weather{"unit": null, "at": {"place": null}, "days": [null, 1]}<|im_end|>'
        assert answers(tokenizer, messages, tools=[tool]) == [wanted]
        tokens = encode({"messages": messages, "tools": [tool]}, "", tokenizer, ChatConfig())
        assert '"default": null' in tokenizer.decode(tokens.tokens)


@pytest.mark.parametrize(
    "use",
    [
        "{{- '\\n' + call.function.arguments }}",
        "{{- call.function.arguments + '\\n' }}",
        "{{- '\\n' ~ call['function']['arguments'] }}",
        "{{- call.function.arguments }}",
        "{%- set a = call.function.arguments %}{{- a | string }}",
    ],
)
def test_arguments_that_a_template_joins_to_a_text_are_json(use: str) -> None:
    tokenizer = prepared(CALLS.replace("ARGUMENTS", use))
    for arguments, wanted in (
        ({"at": "Graz"}, '{"at": "Graz"}'),
        ({"days": None}, '{"days": null}'),
        ({}, "{}"),
    ):
        text = answers(tokenizer, [HI, call(**arguments)], tools=[WEATHER])[0]
        assert "".join(text.split("\n")) == f"weather{wanted}<|im_end|>"


def test_templates_that_render_only_with_tools_fit_rows_with_tools() -> None:
    needs = prepared(AS_JSON)
    assert answers(needs, [HI, call(at="Graz")], tools=[WEATHER]) == [
        'weather{"at": "Graz"}<|im_end|>'
    ]
    assert end_of_turn(needs)[-1] == needs.convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(
        UserError,
        match="row 7, column messages: the chat template refuses it: .* mend it or chat.te",
    ):
        answers(needs, TALK)
    several = tokenizer_with()
    for templates in ({"default": PLAIN, "tool_use": AS_JSON}, {"tool_use": AS_JSON}):
        several.chat_template = templates
        use_template(several, ChatConfig())
        assert answers(several, [HI, CALL], tools=[WEATHER]) == ['weather{"at": "Graz"}<|im_end|>']
    with pytest.raises(
        UserError, match="row 7, column messages: no chat template of the tokenizer is for it: "
    ):
        answers(several, TALK)


def test_roles_that_the_template_does_not_know_are_named_and_can_be_mapped() -> None:
    spoken = [{"role": "human", "content": "Hi"}, {"role": "bot", "content": "Yes"}]
    tokenizer = prepared(PLAIN)
    with pytest.raises(
        UserError, match="by chat.roles which of human, bot is the assistant, such as assistant=bot"
    ):
        answers(tokenizer, spoken)
    roles = ChatConfig(roles=("user=human", "assistant=bot"))
    assert answers(tokenizer, spoken, roles) == answers(tokenizer, [HI, YES])
    strict = (
        "{%- if messages[0].role != 'user' %}{{ raise_exception('No aliens') }}{% endif %}" + PLAIN
    )
    silent = PLAIN.replace("messages %}", "messages if message.role != 'human' %}")
    for template in (strict, silent):
        with pytest.raises(
            UserError, match="or say by chat.roles what human are, such as user=human"
        ):
            answers(prepared(template), [spoken[0], YES])
    theirs = {"conversations": [{"from": "person", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}
    with pytest.raises(
        UserError,
        match=r"is from 'person'; known are .*; name others by chat.roles, such as user=per",
    ):
        encode(theirs, "", tokenizer, ChatConfig())
    assert len(encode(theirs, "", tokenizer, ChatConfig(roles=("user=person",))).tokens)
    with pytest.raises(ValueError, match="should be such as user=human,assistant=bot"):
        ChatConfig(roles=("human",))


def require_same(found: Document, wanted: Document) -> None:
    assert np.array_equal(found.tokens, wanted.tokens)
    assert np.array_equal(found.trained, wanted.trained)


def test_the_columns_of_alpaca_are_a_question_and_an_answer() -> None:
    tokenizer = shipped("chatml")
    row = {
        "instruction": "Add.",
        "input": "1, 2",
        "output": "3",
        "text": "Below is an instruction: ...",
    }
    asked = [{"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"}]
    wanted = encode({"messages": asked}, "", tokenizer, ChatConfig())
    require_same(encode(row, "", tokenizer, ChatConfig()), wanted)
    renamed = {"q": "Add.", "input": "1, 2", "a": "3"}
    settings = ChatConfig(columns=("instruction=q", "output=a"))
    require_same(encode(renamed, "", tokenizer, settings), wanted)
    asked[0]["content"] = "Add."
    wanted = encode({"messages": asked}, "", tokenizer, ChatConfig())
    for empty in ({"input": ""}, {"input": None}, {}):
        found = encode({"instruction": "Add.", "output": "3"} | empty, "", tokenizer, ChatConfig())
        require_same(found, wanted)
    with pytest.raises(
        UserError, match="row 7, column instruction and output: should be text, not 3"
    ):
        encode({"instruction": "Add.", "output": 3}, "row 7", tokenizer, ChatConfig())
