"""Streams lose nothing to faults of the network, and are resumed near where they were left."""

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from datasets import Features, IterableDataset, Value

from lacuna.config import UserError
from lacuna.data.document import BEGINNING
from lacuna.data.sources import Documents
from lacuna.data.stream import BLOCK, Snapshot, Stream, number_of_parts

FEATURES = Features({"text": Value("string")})


def count_up(counts: list[int], log: Path, faults: int) -> Iterator[dict[str, str]]:
    """Numbers as texts; at the 1,500th the line breaks `faults` times, each noted in `log`."""
    for count in counts:
        for number in range(count):
            if number == 1500 and faults and (log.stat().st_size < faults):
                with log.open("a") as file:
                    file.write("x")
                raise ConnectionError("the line is dead")
            yield {"text": str(number)}


def stream_of(tmp_path: Path, count: int, faults: int = 0, **settings: object) -> Stream:
    log = tmp_path / "faults"
    log.touch()
    dataset = IterableDataset.from_generator(
        count_up, features=FEATURES, gen_kwargs={"counts": [count], "log": log, "faults": faults}
    )
    defaults = {"size": 1, "key": 3, "retries": 2}
    return Stream(documents=Documents("numbers", dataset, "text"), **(defaults | settings))


def texts(stream: Stream, start: Snapshot = BEGINNING, count: int = 5000) -> list[str]:
    return [record["text"] for _, (record, _, _) in islice(stream.read(0, start, fewest=1), count)]


def test_a_connection_that_breaks_twice_loses_and_repeats_nothing(tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "a", tmp_path / "b"
    undisturbed.mkdir()
    disturbed.mkdir()
    expected = texts(stream_of(undisturbed, 2500))
    assert sorted(map(int, expected[:2500])) == list(range(2500))
    assert texts(stream_of(disturbed, 2500, faults=2)) == expected
    assert (disturbed / "faults").read_text() == "xx"


def test_a_connection_that_stays_broken_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="dead"):
        texts(stream_of(tmp_path, 2500, faults=2, retries=1))


def test_a_snapshot_leads_to_the_same_documents(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, 2500)
    whole = list(islice(stream.read(0, BEGINNING, fewest=1), 6000))
    for first in (0, BLOCK, 2 * BLOCK, 2500, 2500 + BLOCK, 5000):
        number, (_, _, snapshot) = whole[first]
        assert number == first == snapshot[0]
        assert list(islice(stream.read(0, snapshot, fewest=1), 6000 - first)) == whole[first:]


def test_epochs_differ_and_each_holds_everything(tmp_path: Path) -> None:
    documents = texts(stream_of(tmp_path, 1500), count=3000)
    assert (
        sorted(documents[:1500]) == sorted(documents[1500:])
        and documents[:1500] != documents[1500:]
    )
    assert texts(stream_of(tmp_path, 1500, key=None), count=1500) == [str(n) for n in range(1500)]


def test_a_stream_that_is_not_endless_ends_with_its_last_document(tmp_path: Path) -> None:
    assert len(texts(stream_of(tmp_path, 1500, endless=False))) == 1500


def test_a_reader_serves_its_lanes_and_says_where_each_record_can_be_read_again(
    tmp_path: Path,
) -> None:
    stream = stream_of(tmp_path, 5000)
    whole = texts(stream)
    record = stream.reader(4, {1: (0, BEGINNING), 2: (0, BEGINNING)})
    turns = ((1, range(10)), (2, range(751)), (1, range(10, 1001)))
    served = {4 * turn + lane: record(lane) for lane, own in turns for turn in own}
    assert all(found["text"] == whole[index] for index, (found, _, _) in served.items())
    assert [served[index][2][0] for index in (1, 3002, 4001)] == [0, 2 * BLOCK, 3 * BLOCK]
    again = stream.reader(4, {1: (1001, served[4001][2]), 2: (750, served[3002][2])})
    assert again(2) == served[3002] and again(1)[0]["text"] == whole[4005]


def test_an_empty_stream_is_a_user_error_and_a_small_one_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match="holds no documents"):
        texts(stream_of(tmp_path, 0))
    with caplog.at_level(logging.WARNING):
        list(islice(stream_of(tmp_path, 5).read(0, BEGINNING, fewest=8), 12))
    assert len(caplog.records) == 1 and "only 5 documents" in caplog.text


def test_a_source_is_split_into_equal_parts_that_go_with_the_lanes() -> None:
    assert number_of_parts((1,) * 1024, lanes=64) == 64
    assert number_of_parts((1,) * 1024, lanes=96) == 48
    assert number_of_parts((1,) * 5, lanes=64) == 1
    assert number_of_parts((10, 1000), lanes=64) == 1
    assert number_of_parts((900, 1000, 950, 990), lanes=64) == 4
    sizes = np.random.default_rng(0).integers(1, 100, size=300)
    parts = [sum(part) for part in np.array_split(sizes, number_of_parts(tuple(sizes), lanes=512))]
    assert len(parts) > 1 and max(parts) <= 1.25 * min(parts)
