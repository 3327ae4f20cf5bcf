"""What a teacher said is found by the tokens it was said of, and refused where it is of others."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from lacuna.config import Config, UserError
from lacuna.config.documents import DataConfig, PackingConfig
from lacuna.config.objectives import DistillationConfig
from lacuna.config.sections import JobConfig, TrainingConfig
from lacuna.data.plan import RowPlan, make_row_plan
from lacuna.data.rows import open_rows
from lacuna.data.teacher import (
    DESCRIPTION,
    IDS,
    LOGPROBS,
    create_files,
    describe_files,
    row_counts,
    rows_of,
    vocabulary_key,
)
from texts import tokenizer_of_bytes

TOP_K = 3


def plan_of(
    folder: Path,
    lines: list[dict],
    tokenizer: PreTrainedTokenizerFast,
    said: Path | None = None,
    **packing: str,
) -> RowPlan:
    """The plan of a run on these rows, which learns from what was `said`."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    is_chat = "messages" in lines[0]
    config = Config(
        job=JobConfig(task="distill"),
        data=DataConfig(dataset=str(file)),
        packing=PackingConfig(**packing),
        training=TrainingConfig(seq_len=16),
        distillation=DistillationConfig(
            data="conversations" if is_chat else "texts",
            teacher="x",
            teacher_logprobs=None if said is None else str(said),
        ),
    )
    return make_row_plan(config, tokenizer, config.data.resolved_sources(), lanes=1)


def say(plan: RowPlan, folder: Path) -> Path:
    """Writes of each trained token that its id and the two after it are the likeliest."""
    table = plan.tokens
    ends = np.cumsum(row_counts(table))
    firsts = np.concatenate([[0], ends[:-1]])
    folder.mkdir()
    create_files(str(folder), int(ends[-1]), TOP_K)
    ids = np.load(folder / IDS, mmap_mode="r+")
    logprobs = np.load(folder / LOGPROBS, mmap_mode="r+")
    for number, first in enumerate(firsts):
        document, _ = table.document(number)
        trained = np.ones(len(document.tokens), bool)
        if document.trained is not None:
            trained = document.trained
        rows = rows_of(document, int(first))[trained]
        ids[rows] = document.tokens[trained, None] + np.arange(TOP_K)
        logprobs[rows] = -0.5 * document.tokens[trained, None] - np.arange(TOP_K + 1)
    ids.flush()
    logprobs.flush()
    told = {"teacher": "x", "vocabulary": vocabulary_key(plan.tokenizer)}
    describe_files(str(folder), table, firsts, told)
    return folder


def texts(count: int) -> list[dict]:
    return [{"text": f"{number} is " + "so long " * (number % 7)} for number in range(count)]


def conversations(count: int) -> list[dict]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{number}?"},
                {"role": "assistant", "content": f"It is {number}." * (number % 4 + 1)},
                {"role": "user", "content": "And now?"},
                {"role": "assistant", "content": "The same."},
            ]
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", [texts, conversations])
@pytest.mark.parametrize("mode", ["auto", "best_fit", "concatenate"])
def test_it_lies_beside_the_labels_however_documents_are_packed_and_cut(
    kind, mode: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    if kind is conversations:
        tokenizer = tokenizer_of_bytes()
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        ask = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        tokenizer.chat_template = template + "{% endfor %}" + ask
    rows = kind(20)
    said = say(plan_of(tmp_path, rows, tokenizer), tmp_path / "said")
    rows = rows[::-1][:15]  # fewer, in another order
    plan = plan_of(tmp_path, rows, tokenizer, said, mode=mode, long_examples="split")
    row = open_rows(plan, {0: None}, [])
    batch = plan.batch([row(number) for number in range(8)])
    labels = batch.columns["labels"]
    trained = labels != -100
    assert trained.sum() > 10
    wanted = labels[trained][:, None].numpy()
    assert (batch.columns["teacher_ids"][trained].numpy() == wanted + np.arange(TOP_K)).all()
    logprobs = batch.columns["teacher_logprobs"][trained].numpy()
    assert (logprobs == -0.5 * wanted - np.arange(TOP_K + 1)).all()
    for name in ("teacher_ids", "teacher_logprobs"):
        assert (batch.columns[name][~trained] == 0).all()


def test_other_data_and_another_tokenizer_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    said = say(plan_of(tmp_path, texts(20), tokenizer), tmp_path / "said")
    message = r"2 of 22 documents are not in .*said, the first: .*row 21\b.*lacuna teach RUN.toml"
    with pytest.raises(UserError, match=message):
        plan_of(tmp_path, texts(20) + [{"text": "new"}, {"text": "also"}], tokenizer, said)
    other = tokenizer_of_bytes()
    other.add_tokens(["<think>"])
    with pytest.raises(UserError, match="made with another tokenizer than the model's"):
        plan_of(tmp_path, texts(20), other, said)


def test_files_that_are_damaged_or_not_finished_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    plan = plan_of(tmp_path, texts(20), tokenizer)

    def refusal(folder: Path) -> str:
        with pytest.raises(UserError) as refused:
            plan_of(tmp_path, texts(20), tokenizer, folder)
        return str(refused.value)

    assert "there is no folder" in refusal(tmp_path / "none")
    (tmp_path / "some.unfinished").mkdir()
    assert "did not come to the end" in refusal(tmp_path / "some")
    flipped = say(plan, tmp_path / "flipped")
    with open(flipped / LOGPROBS, "r+b") as file:
        file.seek(-5, 2)
        file.write(b"x")
    assert f"{LOGPROBS} is not as it was written; remove it" in refusal(flipped)
    short = say(plan, tmp_path / "short")
    with open(short / IDS, "r+b") as file:
        file.truncate(100)
    assert f"{IDS} is not as it was written" in refusal(short)
    lacking = say(plan, tmp_path / "lacking")
    (lacking / IDS).unlink()
    assert "is damaged, or is no folder of lacuna teach" in refusal(lacking)
    (lacking / DESCRIPTION).write_text("{")
    assert "is damaged, or is no folder of lacuna teach" in refusal(lacking)
    for content in ("[]", '{"files": {}}', '{"files": []}'):
        (lacking / DESCRIPTION).write_text(content)
        assert "is damaged, or is no folder of lacuna teach" in refusal(lacking)
    newer = say(plan, tmp_path / "newer")
    told = json.loads((newer / DESCRIPTION).read_text())
    (newer / DESCRIPTION).write_text(json.dumps(told | {"format": 9}))
    assert "has format 9, and this lacuna reads 1" in refusal(newer)
