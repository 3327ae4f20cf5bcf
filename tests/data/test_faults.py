"""Data that is damaged, foreign or odd is read, skipped or refused; never with a traceback."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from test_chat import HI, YES, shipped
from transformers import PreTrainedTokenizerFast

from lacuna.config import Config, UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import DataConfig, Source
from lacuna.data import BatchSizes, build_loader
from lacuna.data.document import Document
from lacuna.data.faults import is_damage, may_pass
from lacuna.data.sources import Documents, open_source
from lacuna.data.tokenize import document_of, token_table
from texts import write_lines

GOOD = '{"text": "good"}\n'


def documents(
    path: Path, tokenizer: PreTrainedTokenizerFast, streaming: bool = False
) -> list[Document]:
    found = open_source(Source(dataset=str(path)), DataConfig(streaming=streaming))
    return [
        document_of(record, number, found, tokenizer) for number, record in enumerate(found.dataset)
    ]


@pytest.mark.parametrize(
    "line, reason",
    [
        (r'{"text": "a\ud800b"}', "surrogates not allowed"),
        ('{"text": "a", "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
        ("{}", "no text"),
        ('{"title": "t"}', "no text"),
        ('{"text": ["t"]}', "unfit text"),
        ("[1", "Expecting"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_broken_record_is_skipped_with_its_place_and_reason_wherever_it_is(
    line: str, reason: str, first: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(f"{line}\n{GOOD}" if first else f"{GOOD}{line}\n")
    for streaming in (False, True):
        found = documents(path, tokenizer, streaming)[:: 1 if first else -1]
        assert (
            found[0].broken.startswith(f"{path}:{1 if first else 2}: ")
            and reason in found[0].broken
        )
        assert len(found[1].tokens) == 5 and found[1].broken is None


@pytest.mark.parametrize(
    "ids", [[1.5], [1.0], [1, None], ["a"], [[1], [2]], "1", [True], [2**70], {"a": 1}]
)
def test_ready_made_tokens_that_are_no_whole_numbers_are_broken(
    ids: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text(f'{json.dumps({"input_ids": ids})}\n{{"input_ids": [1, 2]}}\n')
    for streaming in (False, True):
        broken, good = documents(path, tokenizer, streaming)
        assert broken.broken == f"{path}:1: unfit input_ids" and good.tokens.tolist() == [1, 2]
    assert (
        document_of({"input_ids": ids}, 0, Documents("x", None, "input_ids"), tokenizer).broken
        == "x, row 1"
    )


def test_tables_of_tokens_that_are_no_whole_numbers_are_refused(tmp_path: Path) -> None:
    for number, ids in enumerate(([1.5], ["a"], [[1]])):
        Dataset.from_dict({"input_ids": [ids]}).to_parquet(tmp_path / f"{number}.parquet")
        with pytest.raises(UserError, match="input_ids must be lists of whole numbers, but has"):
            open_source(Source(dataset=str(tmp_path / f"{number}.parquet")), DataConfig())


def test_a_folder_of_several_kinds_of_files_is_refused_by_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "picture.png").write_bytes(b"x")
    assert len(open_source(Source(dataset=str(tmp_path)), DataConfig()).dataset) == 1
    Dataset.from_dict({"text": ["b"]}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(
        UserError, match=r"several kinds, json \(a.jsonl\), parquet \(b.parquet\); name those"
    ):
        open_source(Source(dataset=str(tmp_path)), DataConfig())
    assert open_source(Source(dataset=str(tmp_path), files=("*.parquet",)), DataConfig()).dataset[
        "text"
    ][:] == ["b"]
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: mine\n  data_files: '*.jsonl'\n---\n"
    )
    assert open_source(Source(dataset=str(tmp_path)), DataConfig()).dataset["text"][:] == ["a"]


def test_tables_whose_columns_have_other_types_are_no_damage(tmp_path: Path) -> None:
    for name, label in (("a", 1), ("b", "x")):
        table = pa.table({"text": ["a"], "label": [label]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    wrong = "the column label is int64 in a.parquet and string in b.parquet; write it alike"
    with pytest.raises(UserError, match=wrong) as caught:
        open_source(Source(dataset=str(tmp_path)), DataConfig())
    assert "damaged" not in str(caught.value)


def test_a_text_in_another_encoding_is_not_asked_for_json(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("naïve café\n".encode("latin-1") * 9)
    with pytest.raises(UserError, match="latin.txt: 'utf-8' codec .*; write it in UTF-8"):
        open_source(Source(dataset=str(path)), DataConfig())


def damaged(folder: Path) -> list[Path]:
    """Files of tables with other bytes than were written, and with text that is none."""
    table = Dataset.from_dict({"text": [f"good text {number} " * 20 for number in range(3000)]})
    table.to_parquet(folder / "whole.parquet")
    table.save_to_disk(folder / "saved")
    shutil.copy(next((folder / "saved").glob("*.arrow")), folder / "whole.arrow")
    for kind in ("parquet", "arrow"):
        content = (folder / f"whole.{kind}").read_bytes()
        (folder / f"cut.{kind}").write_bytes(content[: len(content) // 2])
        (folder / f"empty.{kind}").write_bytes(b"")
    content = (folder / "whole.parquet").read_bytes()
    (folder / "middle.parquet").write_bytes(content[:200] + bytes(700) + content[900:])
    letters = pa.array([b"good", b"b\xff\xfed", b"fine"], pa.binary())
    strings = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, letters.buffers())})
    pq.write_table(strings, folder / "letters.parquet")
    with (
        pa.OSFile(str(folder / "letters.arrow"), "wb") as file,
        pa.ipc.new_stream(file, strings.schema) as writer,
    ):
        writer.write_table(strings)
    return [
        folder / name
        for name in (
            "cut.parquet",
            "cut.arrow",
            "empty.parquet",
            "empty.arrow",
            "middle.parquet",
            "letters.parquet",
            "letters.arrow",
        )
    ]


def test_damaged_tables_are_refused_at_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    for path in damaged(tmp_path):
        begun = time.monotonic()
        with pytest.raises(
            UserError, match=rf"{path.name} .*is damaged, or not in UTF-8: .*; write or download it"
        ):
            token_table([open_source(Source(dataset=str(path)), DataConfig())], tokenizer, 0)
        assert time.monotonic() - begun < 15, path


def test_damage_is_told_from_faults_that_pass(tmp_path: Path) -> None:
    damaged(tmp_path)
    with pytest.raises(OSError, match="snappy") as found:
        pq.read_table(tmp_path / "middle.parquet")
    assert is_damage(found.value) and not may_pass(found.value)
    assert not is_damage(OSError("broken pipe")) and not is_damage(
        ConnectionResetError(104, "reset")
    )


def test_names_that_look_like_patterns_are_names(tmp_path: Path) -> None:
    names = {
        "a[1].jsonl": "a1.jsonl",
        "b{2}.jsonl": "b2.jsonl",
        "c*.jsonl": "c1.jsonl",
        "d?.jsonl": "d1.jsonl",
    }
    for number, (name, other) in enumerate(names.items()):
        write_lines(tmp_path / name, [str(number)])
        write_lines(tmp_path / other, ["other"])
        for source in (
            Source(dataset=str(tmp_path / name)),
            Source(dataset="json", files=(str(tmp_path / name),)),
            Source(dataset=str(tmp_path), files=(name,)),
        ):
            assert open_source(source, DataConfig()).dataset["text"][:] == [str(number)], name
    (tmp_path / "folder[1]").mkdir()
    with pytest.raises(
        UserError, match=r"folder\[1\] is a pattern to `datasets`; give it a name without brackets"
    ):
        open_source(Source(dataset=str(tmp_path / "folder[1]")), DataConfig())


def test_other_encodings_are_named_and_marks_of_byte_order_are_none_of_the_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        for name, text in (("a.jsonl", GOOD), ("a.json", f"[{GOOD}]"), ("a.txt", "good")):
            (tmp_path / name).write_bytes(text.encode(encoding))
            with pytest.raises(
                UserError, match=f"{name}: is in {encoding.upper()}; write it in UTF-8"
            ):
                open_source(Source(dataset=str(tmp_path / name)), DataConfig())
    for name, text in (("b.jsonl", GOOD), ("b.json", f"\n[{GOOD},\n{GOOD}]"), ("b.txt", "good")):
        (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
        assert {len(one.tokens) for one in documents(tmp_path / name, tokenizer)} == {5}, name


@pytest.mark.parametrize(
    "files, reason",
    [
        ({"data.py": "import datasets"}, "scripts are no longer supported"),
        ({"a.jsonl": GOOD, "README.md": "---\nconfigs: [{\n---\n"}, "while parsing"),
        ({"a.jsonl": GOOD, "README.md": "---\nconfigs: 7\n---\n"}, "Expected configs to be a list"),
        (
            {
                "a.jsonl": GOOD,
                "README.md": "---\ndataset_info:\n  features:\n"
                "  - name: text\n    dtype: odd\n---\n",
            },
            "Odd",
        ),
    ],
)
def test_scripts_and_broken_cards_are_refused(
    files: dict[str, str], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=rf"data .*cannot be opened: .*{reason}"):
        open_source(Source(dataset=str(folder)), DataConfig())


@pytest.mark.parametrize(
    "row, wrong",
    [
        (
            {"conversations": [{"from": ["human"], "value": "Hi"}]},
            "message 1, from: should be text, not ['human']",
        ),
        (
            {"messages": "[" * 100_000 + "]" * 100_000},
            "row 1: cannot be read: maximum recursion depth",
        ),
        ({"messages": json.dumps([HI, YES | {"content": "\ud800"}])}, "row 1: cannot be read: "),
        (
            {"messages": [HI, YES], "tools": "[" * 100_000},
            "row 1: cannot be read: maximum recursion depth",
        ),
        ({"dialog": [HI, YES]}, "row 1: no columns messages"),
    ],
)
def test_odd_conversations_are_refused_by_place(row: dict[str, Any], wrong: str) -> None:
    tokenizer = shipped("chatml")
    with pytest.raises(UserError) as refused:
        document_of(
            row,
            0,
            Documents("talks", Dataset.from_list([]), "messages", chat=ChatConfig()),
            tokenizer,
        )
    assert str(refused.value).startswith("talks, row 1") and wrong in str(refused.value)


@pytest.mark.parametrize("way", [{"streaming": True}, {"tokenization": "online"}])
@pytest.mark.parametrize(
    "count, said",
    [
        (500, "more than 100 unreadable records, the first: "),
        (50, "records in a row hold no text; check data.text_column"),
    ],
)
def test_a_source_of_nothing_but_broken_records_ends_soon(
    way: dict[str, Any], count: int, said: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": 1}\n' * count)
    begun, config = (
        time.monotonic(),
        Config(data=DataConfig(dataset=(str(path),), num_workers=0, **way)),
    )
    with pytest.raises(UserError, match=said):
        next(iter(build_loader(config, tokenizer, BatchSizes(1, 1, 1), 0)))
    assert time.monotonic() - begun < 10


def test_damaged_tables_end_a_stream_at_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    for path in damaged(tmp_path)[-3:]:
        data = DataConfig(dataset=(str(path),), num_workers=0, streaming=True)
        begun = time.monotonic()
        with pytest.raises(
            UserError, match=f"{path.name} .*is damaged, or not in UTF-8: .*; write or download it"
        ):
            next(iter(build_loader(Config(data=data), tokenizer, BatchSizes(1, 1, 1), 0)))
        assert time.monotonic() - begun < 10, path
