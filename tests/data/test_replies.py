"""Replies are the template's own text behind an answer; templates that rewrite are refused."""

import re
from typing import Any

import pytest

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.data.chat import use_template
from lacuna.data.replies import given_tokens, opening
from lacuna.data.template import ask
from talking import PLAIN, tokenizer_of

USER = {"role": "user", "content": "And now?"}
TOOL = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "It rains."}

# Reasoning is dropped from answers before the newest message of the user, as in Qwen 3's.
FORGETS = """
{%- set ns = namespace(last=0) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
COUNTS = PLAIN.replace("m.role +", "m.role + (loop.index | string)[: m.role == 'user'] +")
ONLY_USERS = PLAIN.replace(
    "{{ '<|im_start|>' + m.role", "{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role"
).replace("{% endfor", "{% endif %}{% endfor")
ALTERNATES = PLAIN.replace(
    "messages %}{{",
    "messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{",
)
BEGINS_THINKING = PLAIN.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
ENDS_BY_TEXT = PLAIN.replace("<|im_end|>", "###")


def given(template: str | None, *reply: dict[str, Any]) -> str:
    tokenizer = tokenizer_of(template)
    chat = opening(tokenizer, None, "rollout.environment")
    return str(tokenizer.decode(given_tokens(chat, [*reply])))


@pytest.mark.parametrize("template", ["chatml", "llama3", PLAIN])
@pytest.mark.parametrize("reply", [[USER], [TOOL], [TOOL, TOOL], [TOOL, USER]])
def test_turns_and_replies_are_the_whole_conversation_of_the_template(
    template: str, reply: list[dict[str, Any]]
) -> None:
    tokenizer = tokenizer_of(template)
    use_template(tokenizer, ChatConfig())
    end = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
    chat = opening(tokenizer, None, "rollout.environment")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "Look <b>here</b>."},
    ]
    tokens = tokenizer(ask(tokenizer, messages), add_special_tokens=False).input_ids
    for turn in ("I see.", "  No,\nI do not. "):
        tokens += tokenizer(turn + end, add_special_tokens=False).input_ids
        tokens += given_tokens(chat, reply)
        messages += [{"role": "assistant", "content": turn}, *reply]
    whole = ask(tokenizer, messages)
    if template == "llama3":  # it trims; what the model said stays as it was
        whole = whole.replace("No,\nI do not.", "  No,\nI do not. ")
    assert tokens == tokenizer(whole, add_special_tokens=False).input_ids


def test_replies_are_from_the_end_of_an_answer_to_where_the_next_begins() -> None:
    assert given("chatml", USER) == (
        "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert given(FORGETS, TOOL) == (
        "\n<|im_start|>tool\nIt rains.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "reply", "said"),
    [
        (FORGETS, USER, "the chat template rewrites it: line [79] writes"),
        (BEGINS_THINKING, USER, "the chat template rewrites it: line 1 writes"),
        (COUNTS, USER, "does not write messages of user alike wherever they are"),
        (ONLY_USERS, TOOL, "does not write messages of tool alike .* or leaves them out"),
        (ALTERNATES, TOOL, "refuses it: no tools"),
        (ENDS_BY_TEXT, USER, "ends an answer by '###', which is no special token"),
        (None, USER, "no chat template, by which replies could be written"),
    ],
)
def test_templates_that_would_not_read_what_was_said_are_refused(
    template: str | None, reply: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as refusal:
        given(template, reply)
    assert re.search("chat.template", str(refusal.value))
