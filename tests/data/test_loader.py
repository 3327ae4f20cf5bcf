"""Which samples a step trains on does not depend on ranks, workers or restarts."""

import multiprocessing
import os
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lacuna.config import Config, UserError
from lacuna.config.documents import DataConfig, PackingConfig, Source
from lacuna.config.sections import TrainingConfig
from lacuna.data import Batch, BatchSizes, Loader, build_loader, lanes, merge_states
from texts import write_lines

GLOBAL_BATCH = 8
STEPS = 30
WAYS = {
    "cache": {"tokenization": "cache"},
    "online": {"tokenization": "online"},
    "streaming": {"streaming": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sources: one of two files that streams in several blocks, one of three uneven files."""
    root = tmp_path_factory.mktemp("sources")
    many, few = root / "many", root / "few"
    many.mkdir()
    few.mkdir()
    for number in range(2):
        write_lines(
            many / f"{number}.jsonl", [f"{number}:{n}" + "ab" * (n % 3) for n in range(1100)]
        )
    for number in range(3):
        texts = [f"few {number} {n}" + " more" * (n * n % 5) for n in range(30 + 20 * number)]
        write_lines(few / f"{number}.jsonl", texts)
    return many, few


LAID_OUT, FITTED = PackingConfig(), PackingConfig(mode="best_fit", buffer=2)


def mixed(
    folders: tuple[Path, Path],
    way: dict,
    workers: int = 0,
    packing: PackingConfig = LAID_OUT,
    **training: object,
) -> Config:
    sources = tuple(
        Source(dataset=str(f), weight=w) for f, w in zip(folders, (0.75, 0.25), strict=True)
    )
    data = DataConfig(sources=sources, num_workers=workers, **way)
    return Config(
        data=data, packing=packing, training=TrainingConfig(seq_len=160, seed=7, **training)
    )


def loader_of(
    config: Config, tokenizer: PreTrainedTokenizerFast, rank: int, world: int, micro: int = 1
) -> Loader:
    return build_loader(
        config, tokenizer, BatchSizes(micro, GLOBAL_BATCH // world // micro, GLOBAL_BATCH), rank
    )


def rows_of(batch: Batch) -> list[Tensor]:
    """Each row of a batch with everything that says what it trains on."""
    bounds = torch.zeros(batch.columns["input_ids"].numel() + 1, dtype=torch.int64)
    bounds[batch.cu_seqlens.long()] = 1
    starts = bounds[:-1].view_as(batch.columns["input_ids"])
    return list(
        torch.stack(
            [
                batch.columns["input_ids"],
                batch.columns["labels"],
                batch.columns["position_ids"],
                starts,
            ],
            dim=1,
        )
    )


def take_steps(loaders: list[Loader], steps: int) -> list[Tensor]:
    """The rows of the next steps of all ranks, in their global order."""
    rows = []
    for _ in range(steps):
        for loader in loaders:
            for batch in islice(loader, loader._source.batch.accumulation):
                rows += rows_of(batch)
    return rows


def run(config: Config, tokenizer: PreTrainedTokenizerFast, world: int, micro: int = 1) -> Tensor:
    loaders = [loader_of(config, tokenizer, rank, world, micro) for rank in range(world)]
    rows = take_steps(loaders, STEPS)
    for loader in loaders:
        loader.close()
    return torch.stack(rows)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        pytest.param({"varlen": True, "context_len": 20}, marks=pytest.mark.slow),
        pytest.param({"packing": FITTED}, marks=pytest.mark.slow),
    ],
    ids=["concat", "varlen", "fitted"],
)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_world_size_changes_nothing(
    way: dict, layout: dict, folders: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    config = mixed(folders, way, **layout)
    expected = run(config, tokenizer, world=1)
    assert torch.equal(run(config, tokenizer, world=2, micro=2), expected)
    assert torch.equal(run(config, tokenizer, world=4, micro=2), expected)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_number_of_workers_changes_nothing(
    way: dict, workers: int, folders: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = run(mixed(folders, way), tokenizer, world=1)
    assert torch.equal(run(mixed(folders, way, workers), tokenizer, world=1, micro=4), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is Python's choice")
def test_workers_are_forked_whatever_python_would_do(
    folders: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    """What is forked ends with a killed run; what Python 3.14's server starts does not."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        loader = loader_of(mixed(folders, WAYS["cache"], workers=2), tokenizer, rank=0, world=1)
        next(iter(loader))
        assert [type(one).__name__ for one in multiprocessing.active_children()] == 2 * [
            "ForkProcess"
        ]
        loader.close()
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize(
    "worlds", [(2, 4), *(pytest.param(n, marks=pytest.mark.slow) for n in ((4, 1), (1, 1)))]
)
@pytest.mark.parametrize("packing", [LAID_OUT, FITTED], ids=["concat", "fitted"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_restart_on_other_ranks_goes_on_with_the_same_samples(
    way: dict,
    packing: PackingConfig,
    worlds: tuple[int, int],
    folders: tuple[Path, Path],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    config = mixed(folders, way, packing=packing)
    expected = run(config, tokenizer, world=1)
    rows: list[Tensor] = []
    state = None
    for world, steps in zip((*worlds, worlds[0]), (5, 15, STEPS - 20), strict=True):
        loaders = [loader_of(config, tokenizer, rank, world) for rank in range(world)]
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        rows += take_steps(loaders, steps)
        state = merge_states([loader.state_dict() for loader in loaders])
    assert torch.equal(torch.stack(rows), expected)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_state_tells_what_was_handed_out_not_what_workers_prepared(
    way: dict, folders: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    config = mixed(folders, way, workers=2)
    loader = loader_of(config, tokenizer, rank=0, world=1, micro=4)
    take_steps([loader], 41)
    time.sleep(0.3)
    state = loader.state_dict()
    expected = take_steps([loader], 4)
    loader.close()
    again = loader_of(config, tokenizer, rank=0, world=1, micro=4)
    again.load_state_dict(merge_states([state]))
    assert torch.equal(torch.stack(take_steps([again], 4)), torch.stack(expected))
    again.close()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_shares_are_realised(
    way: dict, folders: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Shares are of documents; the sources' mean lengths turn them into shares of tokens."""
    loader = loader_of(mixed(folders, way), tokenizer, rank=0, world=1, micro=8)
    batches = list(islice(loader, 60))
    tokens = [sum(batch.counts[f"source_{n}"] for batch in batches) for n in range(2)]
    lengths = [mean_length(folder) for folder in folders]
    drawn = [tokens[n] / lengths[n] for n in range(2)]
    assert drawn[0] / sum(drawn) == pytest.approx(0.75, abs=0.03)
    for counts in (batch.counts for batch in batches):
        assert counts["source_0"] + counts["source_1"] == counts["tokens"] == 8 * 160
    assert all(0 < batch.counts["text_bytes"] < batch.counts["tokens"] for batch in batches)


def mean_length(folder: Path) -> float:
    import json

    texts = [json.loads(line)["text"] for path in folder.iterdir() for line in path.open()]
    return sum(len(text) + 1 for text in texts) / len(texts)


def documents_in(rows: list[Tensor]) -> list[bytes]:
    tokens = torch.cat([row[0] for row in rows]).tolist()
    return bytes_between_ends(tokens)


def bytes_between_ends(tokens: list[int]) -> list[bytes]:
    documents, current = [], []
    for token in tokens:
        if token == 256:
            documents.append(bytes(current))
            current = []
        else:
            current.append(token if token < 256 else 0)
    return documents


def test_an_epoch_of_the_cache_holds_each_document_once_and_each_epoch_is_shuffled_anew(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [
        f"document {n}".ljust(31 if n % 2 else 15, "x") for n in range(144)
    ]  # 32 and 16 tokens: 216 full rows
    for number in range(2):
        write_lines(tmp_path / f"{number}.jsonl", texts[number::2])
    config = Config(
        data=DataConfig(
            sources=tuple(Source(dataset=str(tmp_path / f"{n}.jsonl")) for n in range(2)),
            num_workers=0,
        ),
        training=TrainingConfig(seq_len=16, epochs=2),
    )
    loader = loader_of(config, tokenizer, rank=0, world=1, micro=8)
    assert loader.rows_left == 2 * 216
    first, second = (sorted_and_not(take_steps([loader], 27)) for _ in range(2))
    laid_out = sorted_and_not(
        [torch.tensor([row]) for text in texts for row in rows_alone(text, tokenizer)]
    )
    assert first[0] == second[0] == laid_out[0]
    assert first[1] != second[1] and laid_out[1] not in (first[1], second[1])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_fitted_rows_hold_every_document_whole(
    way: dict, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [f"document {n}".ljust(11 + n * n % 83, "x") for n in range(4000)]
    for number in range(8):
        write_lines(tmp_path / f"{number}.jsonl", texts[number::8])
    data = DataConfig(dataset=(str(tmp_path),), num_workers=0, **way)
    config = Config(
        data=data, packing=PackingConfig(mode="best_fit"), training=TrainingConfig(seq_len=512)
    )
    batches = list(islice(loader_of(config, tokenizer, rank=0, world=1, micro=8), 130))
    assert all(batch.columns["position_ids"][:, 0].eq(0).all() for batch in batches)
    seen = {
        document
        for batch in batches
        for row in batch.columns["input_ids"]
        for document in bytes_between_ends(row.tolist())
    }
    assert seen - {b""} == set(encoded(texts, tokenizer))
    full = sum(batch.counts["tokens"] for batch in batches) / sum(
        batch.columns["input_ids"].numel() for batch in batches
    )
    assert full > 0.975


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_rows_are_filled_where_most_examples_are_longer_than_one_and_dropped(
    way: dict, shuffle: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Also by a run that goes on in the middle of them."""
    short = [f"short {n}" for n in range(12)]
    long = ["long" * 40] * 40
    for number in range(3):
        write_lines(tmp_path / f"{number}.jsonl", long + short[number::3] + long)
    data = DataConfig(dataset=(str(tmp_path),), num_workers=0, shuffle=shuffle, **way)
    packing = PackingConfig(mode="best_fit", buffer=1, long_examples="drop")
    config = Config(data=data, packing=packing, training=TrainingConfig(seq_len=64))
    loader = loader_of(config, tokenizer, rank=0, world=1)
    rows = take_steps([loader], 3)
    state = merge_states([loader.state_dict()])
    assert set(documents_in(rows)) - {b""} == set(encoded(short, tokenizer))
    other = loader_of(config, tokenizer, rank=0, world=1)
    other.load_state_dict(state)
    expected = take_steps([loader], 3)
    assert torch.equal(torch.stack(take_steps([other], 3)), torch.stack(expected))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_data_of_which_nothing_fits_is_refused(
    way: dict,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "_MOST_LONG", 300)
    write_lines(tmp_path / "long.jsonl", ["long" * 40] * 40)
    data = DataConfig(dataset=(str(tmp_path),), num_workers=0, **way)
    packing = PackingConfig(mode="best_fit", long_examples="drop")
    config = Config(data=data, packing=packing, training=TrainingConfig(seq_len=64))
    told = "packing.long_examples: none of (40|300) examples has a trained token within 64 tokens"
    with pytest.raises(UserError, match=told):
        take_steps([loader_of(config, tokenizer, rank=0, world=1)], 1)


def test_an_epoch_of_fitted_rows_holds_each_document_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [f"document {n}".ljust(15 + n % 40, "x") for n in range(200)]
    path = write_lines(tmp_path / "texts.jsonl", texts)
    config = Config(
        data=DataConfig(dataset=(str(path),), num_workers=0),
        packing=FITTED,
        training=TrainingConfig(seq_len=64, epochs=2),
    )
    loader = loader_of(config, tokenizer, rank=0, world=1, micro=8)
    rows = [row[0].tolist() for row in take_steps([loader], -(-loader.rows_left // GLOBAL_BATCH))]
    in_pass = loader.plan.rows_per_pass
    for passed in rows[:in_pass], rows[in_pass:]:
        documents = [document for row in passed for document in bytes_between_ends(row) if document]
        assert sorted(documents) == sorted(encoded(texts, tokenizer)) != documents


SMALL = {"concatenate": 16, "best_fit": 32, "none": 32}


@pytest.mark.parametrize("packing", SMALL)
def test_a_run_by_epochs_trains_each_document_as_often_and_no_more(
    packing: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [f"document {n}".ljust(12 + n, "x") for n in range(11)]
    path = write_lines(tmp_path / "texts.jsonl", texts)

    def loaders(epochs: int, world: int, micro: int) -> list[Loader]:
        config = Config(
            data=DataConfig(dataset=(str(path),), num_workers=0),
            packing=PackingConfig(mode=packing),
            training=TrainingConfig(seq_len=SMALL[packing], epochs=epochs),
        )
        return [loader_of(config, tokenizer, rank, world, micro) for rank in range(world)]

    def filled(rows: list[Tensor]) -> list[bytes]:
        return [
            text
            for row in rows
            if (text := bytes(token for token in row[0].tolist() if token < 256))
        ]

    once, short, long = loaders(1, 1, 8), loaders(3, 1, 8), loaders(3, 2, 2)
    size = once[0].rows_left
    first = filled(take_steps(once, -(-size // 8)))
    assert len(first) == size and once[0].rows_left == 0
    assert sum(batch.counts["tokens"] for batch in islice(once[0], 2)) == 0, (
        "something comes after the last row"
    )
    rows = filled(take_steps(short, -(-3 * size // 8)))
    assert rows[:size] == first
    for n in (
        size,
        2 * size,
    ):  # where documents are cut at the ends of rows, each pass cuts them elsewhere
        assert (
            sorted(b"".join(rows[n : n + size])) == sorted(b"".join(first))
            and rows[n : n + size] != first
        )
    steps = -(-3 * size // 8)
    assert sorted(filled(take_steps(long, steps))) == sorted(rows), "other rows on two ranks"
    for loader in (more := loaders(3, 2, 2)):  # the run that came to its end goes on for two passes
        loader.load_state_dict(merge_states([once[0].state_dict()]))
    assert sorted(filled(take_steps(more, -(-2 * size // 8)))) == sorted(rows[size:])


def test_what_is_left_for_the_last_step_is_shared_alike(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_lines(tmp_path / "texts.jsonl", [f"document {n}" for n in range(11)])
    config = Config(
        data=DataConfig(dataset=(str(path),), num_workers=0),
        packing=PackingConfig(mode="none"),
        training=TrainingConfig(seq_len=32, epochs=1),
    )
    for rank, left in enumerate([2, 1]):
        loader = build_loader(config, tokenizer, BatchSizes(2, 2, 8), rank)
        assert [int(batch.columns["real"].any(1).sum()) for batch in islice(loader, 2)] == [
            2,
            2,
        ] and loader.filled == 1
        assert [int(batch.columns["real"].any(1).sum()) for batch in islice(loader, 2)] == [left, 0]


def sorted_and_not(rows: list[Tensor]) -> tuple[list[list[int]], list[list[int]]]:
    tokens = [row[0].tolist() for row in rows]
    return sorted(tokens), tokens


def rows_alone(text: str, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    tokens = [*tokenizer(text)["input_ids"], 256]
    return [tokens[start : start + 16] for start in range(0, len(tokens), 16)]


def test_a_step_on_long_documents_sees_parts_of_many(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_lines(tmp_path / "long.jsonl", [chr(97 + n) * 1000 for n in range(20)])
    config = Config(
        data=DataConfig(dataset=(str(path),), num_workers=0),
        training=TrainingConfig(seq_len=16, steps=1),
    )
    loader = loader_of(config, tokenizer, rank=0, world=1, micro=8)
    seen = [len({int(row[0][0]) for row in take_steps([loader], 1)}) for _ in range(50)]
    assert sum(seen) / len(seen) > 6, "8 rows drawn at random come from 6.7 of the 20 documents"


def encoded(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    return [bytes(tokenizer(text)["input_ids"]) for text in texts]


def test_without_shuffling_documents_come_as_they_are(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [f"{n} document" for n in range(50)]
    path = write_lines(tmp_path / "in_order.jsonl", texts)
    config = Config(
        data=DataConfig(dataset=(str(path),), shuffle=False, num_workers=0),
        training=TrainingConfig(seq_len=32),
    )
    documents = documents_in(take_steps([loader_of(config, tokenizer, rank=0, world=1)], 2))
    assert documents[:40] == encoded(texts, tokenizer)[:40]


def test_a_position_in_other_data_is_refused(
    folders: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    state = loader_of(mixed(folders, WAYS["cache"]), tokenizer, rank=0, world=1).state_dict()
    other = loader_of(mixed(folders, WAYS["online"]), tokenizer, rank=0, world=1)
    with pytest.raises(UserError, match="data.tokenization"):
        other.load_state_dict(merge_states([state]))


def test_a_position_that_says_less_of_the_data_is_refused(
    folders: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    loader = loader_of(mixed(folders, WAYS["cache"]), tokenizer, rank=0, world=1)
    state = loader.state_dict()
    del state["signature"]["packing.mode"]
    with pytest.raises(UserError, match=r"packing.mode \(was None, is concatenate\)"):
        loader.load_state_dict(merge_states([state]))


OTHERS = {
    "data.text_column": "text",
    "chat.train_on": "last",
    "packing.long_examples": "drop",
    "training.seed": 8,
}


@pytest.mark.parametrize("setting", OTHERS)
def test_a_position_of_other_settings_is_refused(
    setting: str, folders: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    config = mixed(folders, WAYS["cache"])
    state = loader_of(config, tokenizer, rank=0, world=1).state_dict()
    section, name = setting.split(".")
    changed = getattr(config, section).model_copy(update={name: OTHERS[setting]})
    other = loader_of(config.model_copy(update={section: changed}), tokenizer, rank=0, world=1)
    with pytest.raises(UserError, match=setting):
        other.load_state_dict(merge_states([state]))


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_broken_records_stop_the_run_with_a_user_error(
    workers: int, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_lines(tmp_path / "mended.jsonl", [f"good {n}" for n in range(30)])
    path.write_text(path.read_text() + "{broken\n" * 4)
    for limit, stops in ((4, False), (3, True)):
        data = DataConfig(
            dataset=(str(path),),
            tokenization="online",
            num_workers=workers,
            max_broken_records=limit,
        )
        config = Config(data=data, training=TrainingConfig(seq_len=64))
        loader = loader_of(config, tokenizer, rank=0, world=1)
        if stops:
            with pytest.raises(UserError, match=r"mended.jsonl:3\d"):
                take_steps([loader], 30)
        else:
            take_steps([loader], 30)
            assert len(loader.state_dict()["broken_records"]) == 4
        loader.close()


def test_workers_end_with_the_loader(
    folders: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    loader = loader_of(mixed(folders, WAYS["online"], workers=2), tokenizer, rank=0, world=1)
    next(loader)
    pids = [worker.pid for worker in loader._batches._workers]
    loader.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
