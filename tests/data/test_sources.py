"""Every form that documents come in reads the same, and what cannot be read is said."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict

from lacuna.config import UserError
from lacuna.config.documents import DataConfig, Source
from lacuna.data.files import BROKEN
from lacuna.data.sources import open_source
from texts import write_lines

TEXTS = ["first", "zweites äöü", "three\nlines\n", ""]


def read(source: Source, streaming: bool = False, **settings: object) -> list[object]:
    documents = open_source(source, DataConfig(streaming=streaming, **settings))
    assert isinstance(documents.dataset, datasets.IterableDataset) == streaming
    return [record[documents.column] for record in documents.dataset]


def make_files(root: Path) -> dict[str, Source]:
    """The same texts in every form."""
    lines = write_lines(root / "plain.jsonl", TEXTS).read_bytes()
    packers = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
    }
    for ending, pack in packers.items():
        (root / f"packed.jsonl.{ending}").write_bytes(pack(lines))
    (root / "list.json").write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))
    table = Dataset.from_dict({"other": [1] * len(TEXTS), "content": TEXTS})
    table.to_parquet(root / "table.parquet")
    table.to_csv(root / "table.csv")
    table.save_to_disk(root / "saved")
    DatasetDict(train=table).save_to_disk(root / "saved_splits")
    (root / "table.arrow").write_bytes(next((root / "saved").glob("*.arrow")).read_bytes())
    folder = root / "folder" / "nested"
    folder.mkdir(parents=True)
    for number in range(2):
        write_lines(folder / f"{number}.jsonl", TEXTS[2 * number : 2 * number + 2])
    names = [
        "plain.jsonl",
        *(f"packed.jsonl.{ending}" for ending in packers),
        "list.json",
        "table.parquet",
        "table.arrow",
        "saved",
        "saved_splits",
        "folder",
        "folder/nested/*.jsonl",
    ]
    sources = {name: Source(dataset=str(root / name)) for name in names}
    sources["reader"] = Source(
        dataset="json", dir=str(root / "folder" / "nested"), files=("0.jsonl", "1.jsonl")
    )
    sources["pattern in a folder"] = Source(dataset=str(root), files=("folder/*/?.jsonl",))
    sources["csv"] = Source(dataset=str(root / "table.csv"))
    return sources


@pytest.mark.parametrize("streaming", [False, True])
def test_all_forms_read_the_same(streaming: bool, tmp_path: Path) -> None:
    for name, source in make_files(tmp_path).items():
        expected = [text or None for text in TEXTS] if name == "csv" else TEXTS
        assert read(source, streaming) == expected, name


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS[:3]):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "3.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert read(Source(dataset=str(tmp_path))) == [*TEXTS[:3], "packed"]


def test_the_splits_of_a_folder_follow_the_names_of_its_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "train-0.jsonl", ["a", "b"])
    write_lines(tmp_path / "validation.jsonl", ["c"])
    assert read(Source(dataset=str(tmp_path))) == ["a", "b"]
    assert read(Source(dataset=str(tmp_path), split="validation")) == ["c"]
    with pytest.raises(UserError, match="train, validation"):
        read(Source(dataset=str(tmp_path), split="test"))


@pytest.mark.parametrize("other", ["wiki.jsonl", "more/wiki.jsonl.zst", "wiki.json"])
def test_files_of_a_folder_that_are_in_no_split_are_refused(other: str, tmp_path: Path) -> None:
    line = '{"text": "a"}\n'
    (tmp_path / "more").mkdir()
    for name in ("train_books.jsonl", "train_code.jsonl", other, "notes.md", "dataset_dict.json"):
        (tmp_path / name).write_text(line)
    with pytest.raises(UserError) as caught:
        open_source(Source(dataset=str(tmp_path)), DataConfig())
    said = str(caught.value)
    assert f"{other} would not be read" in said and "train_books.jsonl" in said
    assert "name all files by data.data_files" in said and "notes.md" not in said
    (tmp_path / other).rename(tmp_path / "test.jsonl")
    assert len(open_source(Source(dataset=str(tmp_path)), DataConfig()).dataset) == 2


def test_a_split_may_be_a_part(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "all.jsonl", [str(n) for n in range(10)])
    Dataset.from_json(str(path)).to_parquet(tmp_path / "all.parquet")
    for name in ("all.jsonl", "all.parquet"):
        assert read(Source(dataset=str(tmp_path / name), split="train[:80%]")) == list("01234567")
        assert read(Source(dataset=str(tmp_path / name), split="train[80%:]")) == list("89")
        with pytest.raises(UserError, match="no length"):
            read(Source(dataset=str(tmp_path / name), split="train[80%:]"), streaming=True)


def test_the_column_is_chosen_or_the_columns_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"title": "t", "story": "s"}\n')
    assert read(Source(dataset=str(path)), text_column="story") == ["s"]
    with pytest.raises(
        UserError, match="no column text or content or input_ids; it has title, story"
    ):
        read(Source(dataset=str(path)))
    with pytest.raises(UserError, match="no column body; it has title, story"):
        read(Source(dataset=str(path)), text_column="body")


def test_tokens_that_are_there_already_are_used(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n')
    documents = open_source(Source(dataset=str(path)), DataConfig())
    assert documents.column == "input_ids" and documents.dataset["input_ids"][:] == [[1, 2, 3], [4]]


@pytest.mark.parametrize("streaming", [False, True])
def test_unreadable_lines_become_records_that_say_where_they_are(
    streaming: bool, tmp_path: Path
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n{"text": 7}\n{"text"\n\n"text"\n{"text": "\xff"}\n'
        b'{"text": "also good"}\n{}'
    )
    documents = open_source(Source(dataset=str(path)), DataConfig(streaming=streaming))
    records = list(documents.dataset)
    assert [record["text"] for record in records] == [
        "good",
        None,
        None,
        None,
        None,
        "also good",
        None,
    ]
    places = [
        record[BROKEN].removeprefix(f"{path}:").partition(":")[0]
        for record in records
        if record[BROKEN]
    ]
    assert places == ["2", "3", "5", "6", "8"]


def test_what_is_not_there_is_a_user_error(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-20])
    wrong = {
        "Unable to find": Source(dataset=str(tmp_path / "b.jsonl")),
        "find any data file at .*nowhere": Source(dataset=str(tmp_path / "nowhere")),
        "Unable to find .*b.jsonl": Source(dataset="json", files=(str(tmp_path / "b.jsonl"),)),
        "needs data.data_files": Source(dataset="json"),
        "doesn't contain any data files": Source(dataset=str(tmp_path / "empty")),
        "empty": Source(dataset=str(tmp_path / "empty.jsonl")),
        "is damaged": Source(dataset=str(tmp_path / "cut.jsonl.gz")),
        "cannot be opened": Source(dataset="nobody/has-this-dataset"),
    }
    for message, source in wrong.items():
        with pytest.raises(UserError, match=message):
            read(source)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "changing.jsonl", ["before"])
    assert read(Source(dataset=str(path))) == ["before"]
    write_lines(path, ["afterwards"])
    assert read(Source(dataset=str(path))) == ["afterwards"]


def test_the_standard_library_is_a_dataset() -> None:
    train = read(Source(dataset="python-stdlib"))
    validation = read(Source(dataset="python-stdlib", split="validation"))
    assert 0.01 < len(validation) / len(train) < 0.12
    assert any("def dataclass" in text for text in train + validation)
    assert datasets.Dataset.from_dict({"text": train}).unique("text")
    with pytest.raises(UserError, match="split"):
        read(Source(dataset="python-stdlib", split="test"))
