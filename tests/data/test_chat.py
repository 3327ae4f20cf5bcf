"""Of a conversation the answers are trained, each with the token that ends it, and nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.fields import Words, read_value
from lacuna.data.chat import conversation_columns, encode, end_of_turn, use_template
from lacuna.data.document import Document
from texts import END, tokenizer_of_bytes

HI, YES, BYE = (
    {"role": role, "content": text}
    for role, text in (("user", "Hi"), ("assistant", "Yes"), ("user", "Bye"))
)
TEXT = {"type": "text", "text": "Hi"}
TALK = [HI, YES, BYE, {"role": "assistant", "content": "So long"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "weather", "arguments": '{"at": "Graz"}'}}],
}
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]

PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}" + PLAIN
)
HEADERS = PLAIN.replace("'<|im_start|>'", "'<|start_header_id|>'").replace(
    "'\\n'", "'<|end_header_id|>'"
)
HEADERS = HEADERS.replace(
    "<|im_start|>assistant\\n", "<|start_header_id|>assistant<|end_header_id|>"
)
STRIPPED_THINKING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>' + (message.thinking or '') + '</think>' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking %}
            {%- generation %}{{- message.thinking + '|' }}{% endgeneration %}
        {%- endif %}
        {%- generation %}{{- message.content }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}"""


def tokenizer_with(template: str | None = None, **settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that knows the special tokens, with a chat template."""
    made = tokenizer_of_bytes()
    made.add_special_tokens({"extra_special_tokens": SPECIAL} | settings)
    made.chat_template = template
    return made


def prepared(
    template: str | None, chat: ChatConfig | None = None, **settings: Any
) -> PreTrainedTokenizerFast:
    made = tokenizer_with(template, **settings)
    use_template(made, chat or ChatConfig())
    return made


def shipped(name: str) -> PreTrainedTokenizerFast:
    made = tokenizer_with(bos_token="<|begin_of_text|>")
    use_template(made, ChatConfig(template=name))
    return made


def trained_texts(document: Document, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """What is trained, a text for each run of tokens."""
    borders = np.flatnonzero(np.diff(document.trained)) + 1
    runs = zip(
        *(np.split(one, borders) for one in (document.tokens, document.trained)), strict=True
    )
    return [tokenizer.decode(tokens) for tokens, trained in runs if trained[0]]


def answers(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    chat: ChatConfig | None = None,
    **more: Any,
) -> list[str]:
    return trained_texts(
        encode({"messages": messages} | more, "talks, row 7", tokenizer, chat or ChatConfig()),
        tokenizer,
    )


def whole_text(document: Document, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode(document.tokens)


LAST = ChatConfig(train_on="last")


@pytest.mark.parametrize("name, end", [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>")])
def test_our_templates_train_every_answer_with_its_end(name: str, end: str) -> None:
    tokenizer = shipped(name)
    tokens = encode({"messages": TALK}, "talks, row 7", tokenizer, ChatConfig())
    assert tokens.tokens.dtype == np.int32 and trained_texts(tokens, tokenizer) == [
        f"Yes{end}",
        f"So long{end}",
    ]
    assert whole_text(tokens, tokenizer) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert answers(tokenizer, TALK, LAST) == [f"So long{end}"]
    assert end_of_turn(tokenizer) == [END, tokenizer.convert_tokens_to_ids(end)]


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_marked_tokens_are_those_that_transformers_finds(template: str) -> None:
    tokenizer = shipped(template)
    theirs = tokenizer.apply_chat_template(
        TALK, return_assistant_tokens_mask=True, return_dict=True
    )
    ours = encode({"messages": TALK}, "talks, row 7", tokenizer, ChatConfig())
    assert ours.trained.tolist() == [bool(mask) for mask in theirs["assistant_masks"]]
    assert ours.tokens.tolist() == theirs["input_ids"]


def test_our_templates_write_the_usual_text() -> None:
    system = {"role": "system", "content": "Be kind."}
    chatml, llama3 = (
        shipped(name).apply_chat_template([system, HI, YES], tokenize=False)
        for name in ("chatml", "llama3")
    )
    assert chatml == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n"
    )
    assert llama3 == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>"
    )


@pytest.mark.parametrize("name", ["chatml", "llama3"])
@pytest.mark.parametrize(
    "messages", [[HI], TALK[:3], [{"role": "system", "content": "Be kind."}, *TALK[:3]]]
)
def test_our_templates_ask_for_an_answer_as_the_answer_begins(
    name: str, messages: list[dict[str, Any]]
) -> None:
    tokenizer = shipped(name)
    for tools in (None, [WEATHER]):
        asked = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.apply_chat_template(
            [*messages, YES], tools=tools, tokenize=False
        ).startswith(f"{asked}Yes<|")


@pytest.mark.parametrize(
    "name, call",
    [
        ("chatml", '{"name": "weather", "arguments": {"at": "Graz"}}'),
        ("llama3", '{"name": "weather", "parameters": {"at": "Graz"}}'),
    ],
)
def test_our_templates_train_calls_and_reasoning_but_no_results(name: str, call: str) -> None:
    tokenizer = shipped(name)
    thoughtful = YES | {"reasoning_content": "Easy."}
    messages = [HI, thoughtful, BYE, CALL, {"role": "tool", "content": "sunny"}, YES]
    tokens = encode(
        {"messages": messages, "tools": [WEATHER]}, "talks, row 7", tokenizer, ChatConfig()
    )
    first, second, third = trained_texts(tokens, tokenizer)
    assert (
        first.startswith("<think>\nEasy.\n</think>\n\nYes<|")
        and call in second
        and third.startswith("Yes<|")
    )
    assert '"name": "weather", "parameters": {"type": "object"}' in whole_text(tokens, tokenizer)


@pytest.mark.parametrize(
    "template, wanted",
    [
        (PLAIN, ["Yes<|im_end|>", "So long<|im_end|>"]),
        (
            PLAIN.replace("'<|im_end|>\\n'", "' <|im_end|>'"),
            ["Yes <|im_end|>", "So long <|im_end|>"],
        ),
        (
            PLAIN.replace("message.content", "message.content | trim"),
            ["Yes<|im_end|>", "So long<|im_end|>"],
        ),
        (
            PLAIN + "{%- if not add_generation_prompt %}{{- eos_token }}{% endif %}",
            ["Yes<|im_end|>", "So long<|im_end|>"],
        ),
        (HEADERS, ["Yes<|im_end|>", "So long<|im_end|>"]),
        (PLAIN.replace("'<|im_end|>\\n'", "eos_token"), ["Yes<end>", "So long<end>"]),
        (DEFAULT_SYSTEM, ["Yes<|im_end|>", "So long<|im_end|>"]),
        (MARKED, ["Yes<|im_end|>", "So long<|im_end|>"]),
    ],
    ids=[
        "newline after",
        "space before",
        "trimmed",
        "closing end of text",
        "header tokens",
        "end of text",
        "default system",
        "marks without the end",
    ],
)
def test_templates_without_our_care_train_every_answer_with_its_end(
    template: str, wanted: list[str]
) -> None:
    tokenizer = prepared(template)
    assert answers(tokenizer, TALK) == wanted
    assert answers(tokenizer, TALK, LAST) == wanted[1:]
    assert answers(tokenizer, TALK[:3]) == wanted[:1]


def test_a_template_that_strips_earlier_thinking_is_refused_with_its_lines() -> None:
    tokenizer = prepared(STRIPPED_THINKING)
    with pytest.raises(UserError) as refused:
        answers(tokenizer, TALK)
    assert str(refused.value) == (
        "talks, row 7, column messages, message 2: where it begins and ends cannot be told, "
        "because the chat template rewrites: line 6 writes 'sistant\\nYes<|im_end|>\\n<|im_start' "
        "in the whole conversation, but line 4 writes 'sistant\\n<think></think>Yes<|im_e' where "
        "it is last; give a template with {% generation %} marks, such "
        'as chat.template = "chatml", or set chat.train_on = "last"'
    )
    thoughtful = TALK[3] | {"thinking": "Hm."}
    assert answers(tokenizer, [*TALK[:3], thoughtful], LAST) == [
        "<think>Hm.</think>So long<|im_end|>"
    ]
    assert answers(tokenizer, [HI, YES]) == ["<think></think>Yes<|im_end|>"]


def test_a_template_that_asks_otherwise_than_it_answers_is_refused_at_once() -> None:
    asking = PLAIN.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<plan>'")
    with pytest.raises(
        UserError, match=r"line 2 writes .* but line 5 writes .*<plan>.* where it is asked"
    ) as refused:
        prepared(asking)
    assert "train_on" not in str(refused.value)


def test_a_system_prompt_that_moves_to_the_last_question_is_refused() -> None:
    moves = "loop.last and message.role == 'user' and messages[0].role == 'system'"
    tokenizer = prepared(
        PLAIN.replace(
            "message.content", f"(messages[0].content if {moves} else '') + message.content"
        )
    )
    with pytest.raises(UserError, match=r"message 3: .*line 2 writes"):
        answers(tokenizer, [{"role": "system", "content": "Be kind."}, HI, YES])


def test_several_marks_of_one_answer_are_one_answer() -> None:
    tokenizer = prepared(MARKED)
    thoughtful = [
        message | {"thinking": "Hm"} if message["role"] == "assistant" else message
        for message in TALK
    ]
    assert answers(tokenizer, thoughtful) == ["Hm|Yes<|im_end|>", "Hm|So long<|im_end|>"]
    assert answers(tokenizer, thoughtful, LAST) == ["Hm|So long<|im_end|>"]
    assert answers(tokenizer, [HI, YES | {"content": ""}]) == ["<|im_end|>"]


def test_a_token_that_begins_before_the_answer_and_holds_some_of_it_is_trained() -> None:
    backend = Tokenizer(
        models.WordLevel({"<end>": 0, "[UNK]": 1, "▁Hi": 2, "▁Yes": 3, "▁:": 4}, "[UNK]")
    )
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.Metaspace(prepend_scheme="never"),
        decoders.Metaspace(),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", unk_token="[UNK]"
    )
    mark = "{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}"
    tokenizer.chat_template = f"{{% for message in messages %}}{{{{ ' : ' }}}}{mark}{{% endfor %}}"
    use_template(tokenizer, ChatConfig())
    encoded = encode({"messages": [YES]}, "", tokenizer, ChatConfig())
    assert encoded.tokens.tolist() == [4, 3, 0]
    assert encoded.trained.tolist() == [False, True, True]


@pytest.mark.parametrize(
    "template, after",
    [
        (PLAIN.replace("<|im_end|>", "<|stop|>"), "<|stop|>"),
        (PLAIN.replace("<|im_end|>", ""), ""),
    ],
)
def test_a_template_from_which_no_model_learns_to_stop_is_refused(
    template: str, after: str
) -> None:
    with pytest.raises(UserError, match="chat.template: after an answer there is '") as refused:
        prepared(template)
    assert f"there is {after!r};" in str(refused.value)


def test_the_template_is_the_tokenizers_own_or_named_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN)
    assert answers(prepared(MARKED, ChatConfig(template=str(file))), [HI, YES]) == ["Yes<|im_end|>"]
    assert prepared(MARKED, ChatConfig(template=str(file))).chat_template == PLAIN
    with pytest.raises(
        UserError, match=r"chat.template: give chatml, llama3 or a file .*did you mean own.jinja"
    ):
        prepared(PLAIN, ChatConfig(template=str(tmp_path / "own.jinj")))
    with pytest.raises(
        UserError,
        match="chat.template: the tokenizer has none of its own; give chatml, llama3 or a file",
    ):
        answers(prepared(None), [HI, YES])
    with pytest.raises(UserError, match="chat.template: the chat template refuses it: .*'endfor'"):
        prepared(PLAIN.replace("{%- endfor %}", ""))


def test_a_tokenizer_without_places_of_tokens_is_refused() -> None:
    with pytest.raises(
        UserError, match="model.tokenizer_path: conversations need a fast tokenizer"
    ):
        use_template(ByT5Tokenizer(), ChatConfig(template="chatml"))


def test_the_beginning_of_text_is_there_once() -> None:
    tokenizer = shipped("llama3")
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <end>",
        special_tokens=[("<|begin_of_text|>", begin), ("<end>", END)],
    )
    encoded = encode({"messages": TALK}, "", tokenizer, ChatConfig())
    beginnings = encoded.tokens == begin
    assert beginnings.sum() == 1 and not encoded.trained[beginnings].any()
    pair = encode({"prompt": "a", "completion": "b"}, "", tokenizer, ChatConfig())
    assert whole_text(pair, tokenizer) == "<|begin_of_text|>ab<end>" and trained_texts(
        pair, tokenizer
    ) == ["b<end>"]


def test_tools_are_read_as_lists_and_as_json_and_arguments_as_the_template_has_them() -> None:
    wanted = {" | tojson": '{"at": "Graz"}', ".at": "Graz", " + '!'": '{"at": "Graz"}!'}
    for use, arguments in wanted.items():
        called = f"(message.content or message.tool_calls[0].function.arguments{use})"
        tokenizer = prepared("{{- tools | tojson }}" + PLAIN.replace("message.content", called))
        for tools in ([WEATHER], json.dumps([WEATHER])):
            assert answers(tokenizer, [HI, CALL], tools=tools) == [f"{arguments}<|im_end|>"]


def test_sharegpt_has_other_names_for_the_same() -> None:
    tokenizer = shipped("chatml")
    called = '{"name": "weather", "arguments": {"at": "Graz"}}'
    spoken = [("system", "Be kind."), ("human", "Hi"), ("gpt", "Yes"), ("human", "Rain?")]
    spoken += [("function_call", called), ("observation", "no"), ("gpt", "No.")]
    theirs = {"conversations": [{"from": role, "value": text} for role, text in spoken]}
    roles = {"human": "user", "gpt": "assistant", "observation": "tool"}
    ours = [{"role": roles.get(role, role), "content": text} for role, text in spoken]
    ours[4] = CALL
    encoded = [encode(row, "", tokenizer, ChatConfig()) for row in (theirs, {"messages": ours})]
    assert np.array_equal(*(one.tokens for one in encoded))
    assert np.array_equal(*(one.trained for one in encoded))


def test_keys_without_a_value_are_dropped_and_others_handed_to_the_template() -> None:
    named = prepared(
        PLAIN.replace("message.content +", "message.name | default('nobody') + message.content +")
    )
    assert answers(named, [HI, YES | {"name": None, "tool_calls": None}]) == ["nobodyYes<|im_end|>"]
    assert answers(named, [HI, YES | {"name": "me"}]) == ["meYes<|im_end|>"]


def test_of_prompt_and_completion_the_completion_is_trained() -> None:
    tokenizer = tokenizer_of_bytes()
    backend = Tokenizer(models.BPE(tokenizer.get_vocab() | {"ab": 300}, [("a", "b")]))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    merging = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    for completion in ("bab", "bab<end>"):
        tokens = encode({"prompt": "aba", "completion": completion}, "", merging, ChatConfig())
        assert trained_texts(tokens, merging) == ["bab<end>"]
        ab, a, b = merging.convert_tokens_to_ids(["ab", "a", "b"])
        assert tokens.tokens.tolist() == [ab, a, b, ab, merging.eos_token_id]
        assert tokens.trained.tolist() == [False, False, True, True, True]
    assert trained_texts(
        encode({"prompt": "", "completion": "ab"}, "", merging, ChatConfig()), merging
    ) == ["ab<end>"]


def test_of_prompt_and_completion_as_messages_the_answers_of_the_completion_are_trained() -> None:
    for tokenizer in (shipped("chatml"), prepared(PLAIN)):
        row = {"prompt": TALK[:2], "completion": TALK[2:]}
        assert trained_texts(encode(row, "", tokenizer, ChatConfig()), tokenizer) == [
            "So long<|im_end|>"
        ]
        row = {"prompt": TALK[:1], "completion": TALK[1:]}
        wanted = ["Yes<|im_end|>", "So long<|im_end|>"]
        assert trained_texts(encode(row, "", tokenizer, ChatConfig()), tokenizer) == wanted
        assert trained_texts(encode(row, "", tokenizer, LAST), tokenizer) == wanted[1:]


def test_a_text_is_trained_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    assert trained_texts(encode({"text": "abc"}, "", tokenizer, ChatConfig()), tokenizer) == [
        "abc<end>"
    ]


def test_the_format_is_told_by_the_columns() -> None:
    for columns, settings, wanted in (
        (["id", "messages", "text"], {}, ("messages",)),
        (["conversations"], {}, ("messages",)),
        (["text", "completion", "prompt"], {}, ("prompt", "completion")),
        (["prompt", "text"], {}, ("text",)),
        (["messages", "body"], {"columns": "text=body"}, ("text",)),
        (["q", "a", "messages"], {"columns": "prompt=q,completion=a"}, ("prompt", "completion")),
        (["a", "b"], {"columns": "text=a,messages=b"}, ("messages",)),
    ):
        needed, found = conversation_columns(columns, ChatConfig(**settings))
        assert needed == wanted
        assert conversation_columns(found.values(), ChatConfig(**settings)) == (needed, found), (
            "and others not"
        )
    with pytest.raises(
        UserError,
        match="no columns messages .*, prompt and completion, .*, or text, but id, prompt; say by",
    ):
        conversation_columns(["id", "prompt"], ChatConfig())
    with pytest.raises(
        UserError, match="no columns messages=dialog, but text; say by chat.columns"
    ):
        conversation_columns(["text"], ChatConfig(columns="messages=dialog"))


def test_renamed_columns_are_read(tokenizer: PreTrainedTokenizerFast) -> None:
    settings = ChatConfig(columns="prompt=question,completion=answer")
    tokens = encode({"question": "a", "answer": "b", "text": "c"}, "", tokenizer, settings)
    assert trained_texts(tokens, tokenizer) == ["b<end>"]
    words = Words(("messages=dialog,tools=functions",))
    assert read_value(ChatConfig.model_fields["columns"], words) == (
        "messages=dialog",
        "tools=functions",
    )
    for wrong in ("messages", "dialog=messages", "text=a,text=b", "text="):
        with pytest.raises(
            ValidationError, match="should be such as messages=dialog, each of messages, prompt"
        ):
            ChatConfig(columns=wrong)


@pytest.mark.parametrize(
    "row, wrong",
    [
        ({"messages": None}, "column messages: should be a list, not None"),
        ({"messages": "Hi"}, "column messages: should be a list, not 'Hi'"),
        ({"messages": []}, "column messages: the conversation is empty; leave the row out"),
        (
            {"messages": [HI, BYE]},
            "column messages: no message is the assistant's; leave the row out",
        ),
        ({"messages": ["Hi"]}, "column messages, message 1: should be a table, not 'Hi'"),
        (
            {"messages": [HI, {"content": "Yes"}]},
            "column messages, message 2, role: should be text, not None",
        ),
        (
            {"messages": [HI, YES | {"content": [{"type": "text"}]}]},
            "message 2, content, text: should be text, not None",
        ),
        (
            {"messages": [HI | {"content": [TEXT, {"type": "image"}]}, YES]},
            "message 1, content: of parts there may be one, a text, not text, image; write",
        ),
        (
            {"messages": [HI, YES | {"content": [TEXT, TEXT]}]},
            "message 2, content: of parts there may be one, a text, not text, text; write",
        ),
        (
            {"messages": [HI | {"content": []}, YES]},
            "message 1, content: of parts there may be one, a text, not none; write",
        ),
        (
            {"messages": [HI | {"content": ["Hi"]}, YES]},
            "message 1, content: should be a table, not 'Hi'",
        ),
        (
            {"messages": [HI, YES | {"content": None}]},
            "column messages, message 2, content: should be text, not None",
        ),
        (
            {"conversations": [{"from": "alien", "value": "Hi"}]},
            "conversations, message 1: is from 'alien'; known are",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "weather"}]},
            "message 1, tool_calls: should be a table",
        ),
        (
            {"messages": [HI, YES | {"tool_calls": {"name": "weather"}}]},
            "message 2, tool_calls: should be a list, not {'",
        ),
        (
            {"messages": [HI, YES | {"tool_calls": ["weather"]}]},
            "message 2, tool_calls: should be a table, not 'weather'",
        ),
        (
            {"messages": [HI, YES | {"tool_calls": [{"id": "1"}]}]},
            "message 2, name of the function: should be text",
        ),
        (
            {
                "messages": [
                    HI,
                    YES | {"tool_calls": [{"function": {"name": "f", "arguments": "1"}}]},
                ]
            },
            "message 2, arguments of f: should be a table, not 1",
        ),
        (
            {"messages": [HI, CALL]},
            "column messages: the chat template does not write tool_calls; set chat.template",
        ),
        (
            {"messages": TALK, "tools": [WEATHER]},
            "column messages: the chat template does not write tools; set",
        ),
        ({"messages": TALK, "tools": "weather"}, "column tools: should be a list, not 'weather'"),
        (
            {"messages": TALK, "tools": ["weather"]},
            "column tools: should be a table, not 'weather'",
        ),
        (
            {"messages": [{"role": "alien", "content": ""}, YES]},
            "column messages: the chat template refuses it: No aliens",
        ),
        (
            {"prompt": None, "completion": "Yes"},
            "column prompt and completion: should be a list, not None",
        ),
        (
            {"prompt": "Hi", "completion": [YES]},
            "column prompt and completion: should be text, not [{'role'",
        ),
        (
            {"prompt": [HI], "completion": "Yes"},
            "column prompt and completion: should be a list, not 'Yes'",
        ),
        (
            {"prompt": [HI, YES], "completion": [BYE]},
            "column prompt and completion: no message is the assistant's",
        ),
        ({"text": None}, "column text: should be text, not None"),
        ({"text": ""}, "column text: no token would be trained; leave the row out, or"),
        (
            {"prompt": "", "completion": ""},
            "column prompt and completion: no token would be trained",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_its_place_and_reason(
    row: dict[str, Any], wrong: str
) -> None:
    strict = (
        "{%- if messages[0].role == 'alien' %}{{ raise_exception('No aliens') }}{% endif %}" + PLAIN
    )
    with pytest.raises(UserError) as refused:
        encode(row, "talks, row 7", prepared(strict), ChatConfig())
    assert str(refused.value).startswith("talks, row 7, column ") and wrong in str(refused.value)


def test_an_answer_that_the_template_leaves_out_is_refused() -> None:
    mark = "{%- generation %}{{- message.content }}{% endgeneration %}"
    silent = MARKED.replace(mark, f"{{%- if message.content != 'Yes' %}}{mark}{{% endif %}}")
    with pytest.raises(
        UserError,
        match="talks, row 7, column messages: no token would be trained; leave the row out",
    ):
        answers(prepared(silent), [HI, YES])


def test_a_template_that_nobody_trains_on_only_leaves_its_end_unknown() -> None:
    assert end_of_turn(tokenizer_with(None)) == [END]
    assert end_of_turn(tokenizer_with("{{ raise_exception('not like this') }}")) == [END]
    several = tokenizer_with(None)
    several.chat_template = {"rag": PLAIN, "tool_use": HEADERS.replace("<|im_end|>", "<|eot_id|>")}
    assert end_of_turn(several) == [
        END,
        *several.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>"]),
    ]
