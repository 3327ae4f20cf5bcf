"""Of preferences each document is two sequences, which come whole, apart and in one micro-batch."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_chat import CALL, DEFAULT_SYSTEM, HI, MARKED, PLAIN, WEATHER, YES, prepared, shipped
from transformers import PreTrainedTokenizerFast

from lacuna.config import Config, UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import CurriculumConfig, CurriculumStage
from lacuna.data import Batch, BatchSizes, Loader, build_loader, build_validation, merge_states
from lacuna.data.chat import encode
from lacuna.data.document import Document
from lacuna.data.judged import read_judged
from lacuna.data.packing import IGNORED
from lacuna.data.plan import make_row_plan
from lacuna.data.preferences import encode_pair
from texts import tokenizer_of_bytes

NO = {"role": "assistant", "content": "No"}
PAIR = {"chosen": [HI, YES], "rejected": [HI, NO]}


def pair(
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    settings: ChatConfig | None = None,
    loss: str = "sigmoid",
) -> Document:
    settings = settings or ChatConfig()
    judged = read_judged(row, "pairs, row 7", tokenizer, settings, loss)
    return encode_pair(judged, tokenizer, settings)


def sequences(document: Document) -> list[tuple[list[int], list[bool]]]:
    return [
        (document.tokens[begin:stop].tolist(), document.trained[begin:stop].tolist())
        for begin, stop in document.bounds
    ]


def as_trained_alone(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    document = encode(row, "", tokenizer, ChatConfig())
    return (document.tokens.tolist(), document.trained.tolist())


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": [HI], "chosen": [YES], "rejected": [NO]},
        {"prompt": [HI], "chosen": [HI, YES], "rejected": [HI, NO]},
        {"prompt": "Hi", "chosen": [HI, YES], "rejected": [NO]},
        {"prompt": "Hi", "messages": [HI, YES], "chosen": [HI, YES], "rejected": [HI, NO]},
        {"messages": [HI], "chosen": "Yes", "rejected": "No", "n_ranked": 3},
        {"prompt": None} | {name: json.dumps(talk) for name, talk in PAIR.items()},
    ],
    ids=["implicit", "apart", "whole", "question", "ultrafeedback", "texts", "json"],
)
@pytest.mark.parametrize("template", ["chatml", "llama3", PLAIN, MARKED])
def test_both_answers_are_as_they_would_be_fine_tuned(row: dict, template: str) -> None:
    tokenizer = shipped(template) if "{" not in template else prepared(template)
    document = pair(row, tokenizer)
    wanted = [as_trained_alone({"messages": [HI, one]}, tokenizer) for one in (YES, NO)]
    assert sequences(document) == wanted
    assert document.sequence_columns == {"chosen": (1.0, 0.0)}
    assert np.isnan(document.text_bytes) and document.tokens.dtype == np.int32


def test_of_several_turns_those_after_the_common_ones_are_trained() -> None:
    tokenizer = shipped("chatml")
    talk = [HI, YES, {"role": "user", "content": "Sure?"}]
    more = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So"}]
    for last, chat in (("So", ChatConfig(train_on="last")), ("Yes So", ChatConfig())):
        row = {"chosen": [*talk, YES, *more], "rejected": [*talk, NO]}
        (chosen, is_chosen), (rejected, is_rejected) = sequences(pair(row, tokenizer, chat))
        assert tokenizer.decode(np.array(rejected)[is_rejected]) == "No<|im_end|>"
        trained = tokenizer.decode(np.array(chosen)[is_chosen])
        assert trained == "".join(f"{word}<|im_end|>" for word in last.split())


def test_tools_and_calls_are_written_in_both() -> None:
    called = "(message.content or message.tool_calls[0].function.arguments + '!')"
    tokenizer = prepared("{{- tools | tojson }}" + PLAIN.replace("message.content", called))
    row = {"chosen": [HI, CALL, HI, YES], "rejected": [HI, CALL, HI, NO], "tools": [WEATHER]}
    found = sequences(pair(row, tokenizer))
    assert found[0] == as_trained_alone(
        {"prompt": [HI, CALL, HI], "completion": [YES], "tools": [WEATHER]}, tokenizer
    )


def test_texts_with_a_prompt_are_as_prompt_and_completion() -> None:
    tokenizer = tokenizer_of_bytes()
    document = pair({"prompt": "ab", "chosen": "c", "rejected": "de"}, tokenizer)
    wanted = [
        as_trained_alone({"prompt": "ab", "completion": one}, tokenizer) for one in ("c", "de")
    ]
    assert sequences(document) == wanted and document.ends == (4, 9)


@pytest.mark.parametrize("label", [True, 1, 1.0, False, 0])
def test_a_label_may_be_a_number(label: float) -> None:
    row = {"prompt": "a", "completion": "b", "label": label}
    assert read_judged(row, "row 7", tokenizer_of_bytes(), ChatConfig(), "kto").labels == (
        float(label),
    )


def test_the_common_beginning_of_texts_is_their_prompt() -> None:
    tokenizer = tokenizer_of_bytes()
    asked = "\n\nHuman: Hi\n\nAssistant: "
    row = {"chosen": f"{asked}Yes.", "rejected": f"{asked}Yesterday"}
    (chosen, is_chosen), (rejected, is_rejected) = sequences(pair(row, tokenizer))
    assert tokenizer.decode(chosen) == f"{asked}Yes.<end>"
    assert tokenizer.decode(np.array(chosen)[is_chosen]) == ".<end>"
    assert tokenizer.decode(np.array(rejected)[is_rejected]) == "terday<end>"
    row = {"chosen": f"{asked}é", "rejected": f"{asked}è"}  # which begin with the same byte
    (chosen, is_chosen), _ = sequences(pair(row, tokenizer))
    assert tokenizer.decode(np.array(chosen)[is_chosen]) == "é<end>"
    row = {"chosen": f"{asked}Yes", "rejected": f"{asked}Yes, no"}
    (chosen, is_chosen), _ = sequences(pair(row, tokenizer))
    assert tokenizer.decode(np.array(chosen)[is_chosen]) == "<end>"


@pytest.mark.parametrize(
    ("row", "loss", "wrong"),
    [
        ({"chosen": [HI, YES], "rejected": [HI, YES]}, "sigmoid", "both answers are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "sigmoid", "both answers are the same"),
        (
            {"messages": [HI, YES], "chosen": "b", "rejected": "c"},
            "sigmoid",
            "the prompt ends with an answer, and another would follow; give the messages before",
        ),
        (
            {"prompt": [HI, YES], "chosen": [YES], "rejected": [NO]},
            "sigmoid",
            "the prompt ends with an answer",
        ),
        ({"chosen": "ab", "rejected": "ab"}, "sigmoid", "both answers are the same"),
        ({"chosen": "ab", "rejected": "cb"}, "sigmoid", "do not begin alike.*share no prompt"),
        (
            {"chosen": [HI, YES], "rejected": [HI | {"content": "Ho"}, YES]},
            "sigmoid",
            "do not begin alike.*share no prompt",
        ),
        (
            {"prompt": [HI], "chosen": [HI | {"content": "Ho"}, YES], "rejected": [NO]},
            "sigmoid",
            "does not begin with the prompt",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "sigmoid", "an answer is empty"),
        ({"chosen": [HI, YES], "rejected": [HI]}, "sigmoid", "an answer is empty"),
        (
            {"chosen": [HI, YES], "rejected": [HI, NO | {"content": ""}]},
            "sigmoid",
            "an answer is empty",
        ),
        (
            {"chosen": [HI, YES], "rejected": [HI, NO, HI]},
            "sigmoid",
            "an answer ends with a message of user",
        ),
        ({"chosen": [HI, YES], "rejected": "No"}, "sigmoid", "should be a list, not 'No'"),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "ipo",
            'answers with a label.*preference.loss = "kto"',
        ),
        (
            {"prompt": "a", "completion": "b", "label": -1},
            "kto",
            "column label: should be true or false, or 1 or 0, not -1; mend the row",
        ),
        (
            {"prompt": "a", "completion": "b", "label": "true"},
            "kto",
            "column label: should be true or false, or 1 or 0, not 'true'; mend the row",
        ),
        ({"prompt": "a", "completion": "", "label": True}, "kto", "an answer is empty"),
        ({"text": "a"}, "sigmoid", "no columns chosen and rejected .*chat.columns"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_its_place(
    row: dict, loss: str, wrong: str
) -> None:
    with pytest.raises(UserError, match=f"^pairs, row 7.*{wrong}"):
        pair(row, shipped("chatml"), loss=loss)


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    told = "{{- '<|im_start|>' + messages[-1].content }}" + MARKED
    with pytest.raises(UserError, match="the prompt becomes other tokens.*the chat template rewri"):
        pair(PAIR, prepared(told))
    assert pair(PAIR, prepared(DEFAULT_SYSTEM)).trained.any()


def test_columns_may_have_other_names() -> None:
    settings = ChatConfig(columns=("chosen=better", "rejected=worse"))
    row = {"better": [HI, YES], "worse": [HI, NO], "chosen": "neither"}
    assert sequences(pair(row, shipped("chatml"), settings)) == sequences(
        pair(PAIR, shipped("chatml"))
    )


WORDS = ["one", "two", "three four", "five", "six seven eight"]


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{number}:" + "?" * (number % 5),
            "chosen": f"{number} {WORDS[number % 5]}",
            "rejected": f"{number} {WORDS[(number + 1) % 5]}",
        }
        for number in range(count)
    ]


def config_of(
    folder: Path,
    rows: list[dict[str, Any]],
    loss: str = "sigmoid",
    data: dict[str, Any] | None = None,
    packing: dict[str, Any] | None = None,
    **training: Any,
) -> Config:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(
        job={"task": "preference"},
        preference={"loss": loss},
        data={"dataset": str(file), "num_workers": 0} | (data or {}),
        packing={"buffer": 2} | (packing or {}),
        validation={"dataset": str(file), "dataset_split": "train"},
        training={"seq_len": 96, "seed": 7} | training,
    )


def loaders(config: Config, tokenizer: PreTrainedTokenizerFast, world: int = 1) -> list[Loader]:
    plan = BatchSizes(2, 2 // world, 4)
    return [build_loader(config, tokenizer, plan, rank) for rank in range(world)]


def sequences_in(batch: Batch) -> list[list[int]]:
    """The tokens of each piece of a batch that is no padding; checks all that lies beside them."""
    ids, labels, positions, real, number = (
        batch.columns[name].flatten()
        for name in ("input_ids", "labels", "position_ids", "real", "sequence")
    )
    found = []
    bounds = batch.cu_seqlens.tolist()
    for begin, stop in zip(bounds, bounds[1:], strict=False):
        assert positions[begin:stop].tolist() == list(range(stop - begin))
        if not real[begin]:
            assert (labels[begin:stop] == IGNORED).all() and not number[begin:stop].any()
            continue
        assert real[begin:stop].all()
        predicted = labels[begin:stop] != IGNORED
        assert not predicted[-1]
        assert torch.equal(labels[begin:stop][predicted], ids[begin + 1 : stop][predicted[:-1]])
        assert (number[begin:stop] == len(found)).all()
        found.append(ids[begin:stop].tolist())
    for column in batch.sequence_columns.values():
        assert column.dtype == torch.float32 and column.shape == (len(found),)
    return found


WAYS = {"cache": {"tokenization": "cache"}, "online": {"tokenization": "online"}}
WAYS["streaming"] = {"streaming": True}


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return shipped("chatml")


@pytest.mark.parametrize("mode", ["auto", "none"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_pair_is_whole_in_one_micro_batch(
    way: dict, mode: str, tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    rows = pairs(40)
    config = config_of(tmp_path, rows, data=way, packing={"mode": mode})
    wanted = {str(sequence[0]) for row in rows for sequence in sequences(pair(row, words))}
    (loader,) = loaders(config, words)
    met = set()
    for batch in islice(loader, 30):
        found = sequences_in(batch)
        chosen = batch.sequence_columns["chosen"].tolist()
        assert chosen == [1.0, 0.0] * (len(found) // 2)
        assert (batch.counts["pairs"], batch.counts["sequences"]) == (len(found) / 2, len(found))
        texts = [words.decode(one) for one in found]
        for first, second in zip(texts[::2], texts[1::2], strict=True):
            assert first.partition(":")[0] == second.partition(":")[0]
        met |= set(map(str, found))
    assert met <= wanted and len(met) > len(wanted) / 2


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_two_ranks_and_a_restart_see_the_same_pairs(
    way: dict, tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    config = config_of(tmp_path, pairs(40), data=way)

    def steps(made: list[Loader], count: int) -> list[list[list[int]]]:
        return [
            [
                one
                for loader in made
                for batch in islice(loader, 2 // len(made))
                for one in sequences_in(batch)
            ]
            for _ in range(count)
        ]

    expected = steps(loaders(config, words), 12)
    two = loaders(config, words, world=2)
    found = steps(two, 5)
    state = merge_states([loader.state_dict() for loader in two])
    (again,) = loaders(config, words)
    again.load_state_dict(state)
    assert found + steps([again], 7) == expected


def test_an_epoch_and_the_validation_set_have_every_pair_once(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    config = config_of(tmp_path, pairs(33), epochs=1, steps=None)
    (loader,) = loaders(config, words)
    seen = []
    while loader.rows_left:
        seen += [batch for batch in islice(loader, 2)]
    held_out = [
        list(build_validation(config, words, BatchSizes(2, 1, 4), rank)()) for rank in (0, 1)
    ]
    for batches in (seen, held_out[0] + held_out[1]):
        found = [str(one) for batch in batches for one in sequences_in(batch)]
        assert len(found) == len(set(found)) == 66
        assert sum(batch.counts["pairs"] for batch in batches) == 33
        names = [(batch.counts.keys(), batch.sequence_columns.keys()) for batch in batches]
        assert all(one == names[0] for one in names)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_pair_longer_than_a_row_is_refused_or_dropped(
    way: dict, tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    rows = pairs(40)
    rows[5]["chosen"] *= 40
    told = r"training.seq_len: 1 of \d+ pairs are longer than a row of 96 .*the longest \d{3}"
    for long_examples in ("truncate", "split"):
        config = config_of(tmp_path, rows, data=way, packing={"long_examples": long_examples})
        with pytest.raises(UserError, match=rf'{told}.*packing.long_examples = "drop"'):
            list(islice(loaders(config, words)[0], 30))
    config = config_of(tmp_path, rows, data=way, packing={"long_examples": "drop"})
    batches = list(islice(loaders(config, words)[0], 40))
    met = {str(one) for batch in batches for one in sequences_in(batch)}
    assert len(met) == 78


def test_a_pair_longer_than_the_rows_of_a_later_stage_is_refused_before_the_first(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    stages = (CurriculumStage(from_step=2, seq_len=96), CurriculumStage(from_step=4, seq_len=16))
    config = config_of(tmp_path, pairs(40)).model_copy(
        update={"curriculum": CurriculumConfig(stages=stages)}
    )
    with pytest.raises(UserError, match=r"curriculum.stages, table 2: .* than a row of 16 "):
        loaders(config, words)


@pytest.mark.parametrize(
    ("loss", "changes", "wrong"),
    [
        ("sigmoid", {"packing": {"mode": "concatenate"}}, "packing.mode: pairs are not cut"),
        ("sigmoid", {"data": {"document_mask": False}}, "data.document_mask"),
        ("sigmoid", {"data": {"predict_across_documents": True}}, "data.predict_across_documents"),
        ("kto", {"data": {"streaming": True}}, 'data.streaming, preference.loss: "kto"'),
        ("kto", {"data": {"tokenization": "online"}}, 'data.tokenization, preference.loss: "kto"'),
    ],
)
def test_settings_that_part_pairs_are_refused(
    loss: str, changes: dict, wrong: str, tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UserError, match=wrong):
        loaders(config_of(tmp_path, pairs(4), loss, **changes), words)


def table_of(config: Config, tokenizer: PreTrainedTokenizerFast) -> list[Document]:
    plan = make_row_plan(config, tokenizer, config.data.resolved_sources(), 1)
    return [plan.table.document(number)[0] for number in range(len(plan.table.lengths))]


def labelled(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{number}:", "completion": f"<{number}>", "label": number % 3 == 0}
        for number in range(count)
    ]


@pytest.mark.parametrize("way", [{}, {"tokenization": "online"}])
def test_an_answer_sees_all_of_its_prompt(
    way: dict, tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    rows = [*pairs(8), {"prompt": "?" * 90, "chosen": "a", "rejected": "b"}]

    def open_with(context_len: int) -> list[Batch]:
        packing = {"long_examples": "drop"}
        sight = {"context_len": context_len, "varlen": True}
        config = config_of(tmp_path, rows, data=way, packing=packing, **sight)
        return list(islice(loaders(config, words)[0], 8))

    assert len(open_with(24)) == 8
    with pytest.raises(UserError, match="training.context_len: an answer has 24 tokens"):
        open_with(23)


@pytest.mark.parametrize("first", ["a pair", "a label"])
def test_pairs_among_labelled_answers_are_refused(
    first: str, tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    rows = [*pairs(2), *labelled(2)]
    rows = rows if first == "a pair" else rows[::-1]
    with pytest.raises(UserError, match=r"row 3, .*give all rows the same form"):
        table_of(config_of(tmp_path, rows, "kto"), words)


def test_a_labelled_answer_lies_beside_that_of_the_next_row(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    documents = table_of(config_of(tmp_path, labelled(4), "kto"), words)
    texts = [[words.decode(tokens) for tokens, _ in sequences(one)] for one in documents]
    assert texts == [
        ["0:<0><end>", "0:<1><end>"],
        ["1:<1><end>", "1:<2><end>"],
        ["2:<2><end>", "2:<3><end>"],
        ["3:<3><end>", "3:<0><end>"],
    ]
    assert [one.sequence_columns["chosen"] for one in documents] == [
        (1.0, 1.0),
        (0.0, 0.0),
        (0.0, 0.0),
        (1.0, 1.0),
    ]
    assert {one.sequence_columns["mismatched"] for one in documents} == {(0.0, 1.0)}


def test_of_a_pair_kto_learns_from_both_answers(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    rows = [
        {"prompt": [HI | {"content": f"{n}"}], "chosen": f"good {n}", "rejected": f"bad {n}"}
        for n in range(3)
    ]
    documents = table_of(config_of(tmp_path, rows, "kto"), words)
    answers = [
        [words.decode(np.array(tokens)[trained]) for tokens, trained in sequences(one)]
        for one in documents
    ]
    assert answers == [
        [f"{kind} {number}<|im_end|>" for number in (n, (n + 1) % 3)]
        for n in range(3)
        for kind in ("good", "bad")
    ]
    assert [one.sequence_columns["chosen"][0] for one in documents] == [1.0, 0.0] * 3


def test_mismatched_answers_are_no_sequences_that_are_judged(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    (loader,) = loaders(config_of(tmp_path, labelled(20), "kto"), words)
    for batch in islice(loader, 6):
        count = len(sequences_in(batch))
        assert batch.sequence_columns["mismatched"].tolist() == [0.0, 1.0] * (count // 2)
        assert batch.counts["sequences"] == batch.counts["pairs"] == count / 2


def test_broken_rows_are_left_out_and_no_answer_is_taken_from_them(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    config = config_of(tmp_path, labelled(3), "kto")
    file = Path(config.data.dataset[0])
    lines = file.read_text().splitlines()
    file.write_text("\n".join(["{", lines[0], "{", lines[1], lines[2], "{"]))
    documents = [one for one in table_of(config, words) if len(one.tokens)]
    texts = [[words.decode(tokens) for tokens, _ in sequences(one)] for one in documents]
    assert [second for _, second in texts] == ["0:<1><end>", "1:<2><end>", "2:<0><end>"]


def test_the_place_of_a_bad_row_is_told_where_rows_are_there_twice(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    rows = pairs(4)
    rows[2]["rejected"] = rows[2]["chosen"]
    for loss in ("sigmoid", "kto"):
        with pytest.raises(UserError, match="row [23].*both answers are the same"):
            table_of(config_of(tmp_path, rows, loss), words)
