"""Calls of tools are read as templates write them, made, and answered, also where they fail."""

import asyncio
import inspect
import json
from typing import Any

import pytest

from lacuna.config import UserError
from lacuna.config.reinforcement import RolloutConfig
from lacuna.data.replies import opening
from lacuna.data.template import Chat
from lacuna.data.tools import descriptions_of
from lacuna.rollout.environment import check_environment, find_environment
from lacuna.rollout.tool_calls import calls_in
from talking import PLAIN, tokenizer_of

# A family whose calls are tags, and what transformers reads them by.
TAGGED = (
    "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call ' + call.function.name + '>' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<' + key + '>' + value + '</' + key + '>' }}{% endfor %}{{ '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
READ_BY = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def add(first: int, second: int) -> int:
    """Adds.

    Args:
        first: A number.
        second: Another.
    """
    return first + second


async def look(place: str) -> dict[str, str]:
    """Looks somewhere.

    Args:
        place: Where.
    """
    await asyncio.sleep(0)
    if place == "nowhere":
        raise LookupError("there is no such place")
    return {place: "blue"}


def undescribed(first):  # type: ignore[no-untyped-def]
    return first


number = 3
TOOLS = (f"{__name__}:add", f"{__name__}:look")


def chat_of(template: str = "chatml", read_by: dict[str, Any] | None = None) -> Chat:
    tokenizer = tokenizer_of(template)
    tokenizer.response_template = read_by
    return opening(tokenizer, descriptions_of(TOOLS), "rollout.tools")


def reply_to(text: str) -> tuple[list[str] | None, float]:
    """What the functions answer to a turn, and how many calls failed."""
    rollout = RolloutConfig(tools=TOOLS)
    environment: Any = find_environment(rollout, tokenizer_of("chatml"))({}, 0)
    reply = environment.reply(text)
    if inspect.isawaitable(reply):
        reply = asyncio.run(_awaited(reply))
    if reply is None:
        return None, environment.tool_errors
    assert [message["role"] for message in reply] == ["tool"] * len(reply)
    assert len({message["tool_call_id"] for message in reply}) == len(reply)
    return [message["content"] for message in reply], environment.tool_errors


async def _awaited(reply: Any) -> Any:
    return await reply


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"So. {call('add', first=1, second={'a': ['}']})}", [("add", [1, {"a": ["}"]}])]),
        (call("add", first=1) + "\n" + call("look"), [("add", [1]), ("look", [])]),
        ('{"name": "add", "parameters": {"first": 2}}', [("add", [2])]),
        (f"<think>{call('add', first=1)}</think>{call('look', place='x')}", [("look", ["x"])]),
        ('{"set": {"name": "add", "arguments": {"first": 3}}}', [("add", [3])]),
        ('{"name": "add", "arguments": {"first": 1}', []),
        ('{"name": "add", "arguments": "first"} {"name": 3, "arguments": {}} {1} [{', []),
        ("no call", []),
    ],
)
def test_calls_are_the_objects_with_a_name_and_arguments(text: str, wanted: list[Any]) -> None:
    found = calls_in(text, chat_of())
    assert [(one["name"], [*one["arguments"].values()]) for one in found] == wanted


def test_calls_are_read_by_the_template_of_the_tokenizer_where_it_has_one() -> None:
    chat = chat_of(TAGGED, READ_BY)
    found = calls_in("So <call add><first>1</first><second>22</second></call>", chat)
    assert found == [{"name": "add", "arguments": {"first": 1, "second": 22}}]
    assert calls_in("nothing", chat) == []
    assert calls_in("So <call add><first>1</fir", chat) in ([], [{"name": "add", "arguments": {}}])


def test_what_a_template_reads_but_is_no_call_is_none() -> None:
    calls = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
    calls["transform"] = {"type": "function", "function": "{content}"}
    chat = chat_of("chatml", READ_BY | {"fields": READ_BY["fields"] | {"tool_calls": calls}})
    assert calls_in(call("add", first=1), chat) == [{"name": "add", "arguments": {"first": 1}}]
    wrong = ({"tool": "look"}, [1], 3, {"name": ["look"]}, {"name": "a", "arguments": 1})
    for said in map(json.dumps, wrong):
        assert calls_in(f"<tool_call>{said}</tool_call>", chat) == [], said


def test_half_a_pair_of_surrogates_is_answered_in_text_that_can_be_written() -> None:
    answers, errors = reply_to('{"name": "\\ud83d", "arguments": {}}')
    assert errors == 1 and answers is not None
    assert answers[0].startswith("Error: LookupError: there is no ?")
    answers[0].encode()


def test_functions_are_called_and_answer_by_what_they_return_or_raise() -> None:
    assert reply_to("Done.") == (None, 0)
    assert reply_to(call("add", first=1, second=2)) == (["3"], 0)
    both = call("look", place="the sky") + call("add", first=1, second=1)
    assert reply_to(both) == (['{"the sky": "blue"}', "2"], 0)
    wrong = call("look", place="nowhere") + call("add", first=1) + call("sing")
    answers, errors = reply_to(wrong)
    assert errors == 3 and answers is not None
    assert answers[0] == "Error: LookupError: there is no such place"
    assert answers[1].startswith("Error: TypeError: add() missing 1 required")
    assert answers[2] == "Error: LookupError: there is no sing, but add, look"


@pytest.mark.parametrize(
    ("template", "read_by"), [("chatml", None), ("llama3", None), (TAGGED, READ_BY)]
)
def test_templates_that_write_tools_are_taken(template: str, read_by: dict | None) -> None:
    tokenizer = tokenizer_of(template)
    tokenizer.response_template = read_by
    check_environment(RolloutConfig(tools=TOOLS), (), tokenizer)


class Silent:
    pass


class Worthless:
    def __init__(self, row: dict[str, Any], seed: int) -> None: ...

    def reply(self, text: str) -> None: ...


def takes_one(row: dict[str, Any]) -> Worthless:
    return Worthless(row, 0)


@pytest.mark.parametrize(
    ("settings", "template", "said"),
    [
        ({"tools": ("add",)}, "chatml", "give it as module:function"),
        ({"tools": ("no_such_module:add",)}, "chatml", "no_such_module does not import"),
        ({"tools": (f"{__name__}:ad",)}, "chatml", "did you mean add"),
        ({"tools": (f"{__name__}:number",)}, "chatml", "is no function"),
        ({"tools": (TOOLS[0], TOOLS[0])}, "chatml", "two functions are called add"),
        ({"tools": (f"{__name__}:undescribed",)}, "chatml", "does not say what it does"),
        ({"tools": TOOLS}, PLAIN, "the chat template does not write tool_calls and tools"),
        ({"tools": TOOLS}, TAGGED, r"is read as \[\]: give the tokenizer a response_template"),
        ({"tools": TOOLS}, None, "the tokenizer has no chat template"),
        ({"environment": "Silent"}, PLAIN, "give it as module:class"),
        ({"environment": "no_such_module:A"}, PLAIN, "no_such_module does not import"),
        ({"environment": f"{__name__}:Silent"}, PLAIN, r"has no reply\(text\)"),
        ({"environment": f"{__name__}:number"}, PLAIN, r"has no reply\(text\)"),
        ({"environment": f"{__name__}:takes_one"}, PLAIN, "cannot be called with two values"),
        ({"environment": f"{__name__}:Worthless"}, PLAIN, r"has no reward\(\)"),
        ({"environment": f"{__name__}:Worthless"}, None, "the tokenizer has no chat template"),
    ],
)
def test_what_cannot_reply_is_refused(settings: dict, template: str | None, said: str) -> None:
    rollout = RolloutConfig(**settings)
    rewards = ("environment",) if template == PLAIN else ()
    with pytest.raises(UserError, match=said):
        check_environment(rollout, rewards, tokenizer_of(template))
