"""What `lacuna data` shows are the examples of the first step, and nothing else."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lacuna.config import Config, logger
from lacuna.data import BatchSizes, build_loader, run_tokenizer
from lacuna.data.tokenizer import load_tokenizer
from lacuna.plan.examples import coloured, show_data
from runs import write_model


@pytest.mark.parametrize("tokenization", ["cache", "online"])
def test_padding_is_neither_shown_nor_counted(
    tokenization: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": "a" * size}) + "\n" for size in (4, 9, 10, 20))
    )
    config = Config(
        model={"config": str(write_model(tmp_path / "model"))},
        data={
            "dataset": str(tmp_path / "data.jsonl"),
            "tokenization": tokenization,
            "shuffle": False,
        },
        packing={"mode": "none"},
        training={"seq_len": 32, "batch_size": 4},
    )
    show_data(config, 1)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    sizes = [int(line.split()[2]) for line in lines if line.startswith("example ")]
    assert len(sizes) == 3 and set(sizes) <= {5, 10, 11, 21}
    assert sum(line.count("<end>") for line in lines) == 3
    counted = [line.rstrip("█ ") for line in lines if line.startswith("below")]
    assert counted == [
        "below 8 tokens 1 examples",
        "below 16 tokens 2 examples",
        "below 32 tokens 1 examples",
    ]
    assert any("47 tokens in 4 rows" in line for line in lines)


@pytest.mark.parametrize("way", [{"tokenization": "cache"}, {"tokenization": "online"}], ids=str)
def test_what_is_shown_is_what_the_first_step_trains(
    way: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (json.dumps({"text": "a" * size}) for size in range(1, 201))
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    config = Config(
        model={"config": str(write_model(tmp_path / "model"))},
        data={"dataset": str(tmp_path / "data.jsonl"), "num_workers": 0, **way},
        packing={"mode": "best_fit", "buffer": 2},
        training={"seq_len": 256, "batch_size": 2},
    )
    show_data(config, 1)
    shown = re.findall(r"example \d: (\d+) tokens", capsys.readouterr().out)
    tokenizer = run_tokenizer(config.model, config.conversations)
    batch = next(iter(build_loader(config, tokenizer, BatchSizes(2, 1, 2), 0)))
    assert [int(size) for size in shown] == batch.cu_seqlens.diff()[:3].tolist()


def test_examples_of_which_rows_have_nothing_are_counted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    asked = [(3, 3), (3, 50), (60, 3), (70, 3)]  # of the last two no answer is within a row
    rows = [{"prompt": "a" * question, "completion": "b" * size} for question, size in asked]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        job={"task": "sft"},
        model={"config": str(write_model(tmp_path / "model"))},
        data={"dataset": str(tmp_path / "data.jsonl")},
        packing={"mode": "best_fit", "long_examples": "truncate"},
        training={"seq_len": 32, "batch_size": 1},
    )
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger=logger.name)
    show_data(config, 1)
    build_loader(config, run_tokenizer(config.model, config.conversations), BatchSizes(1, 1, 1), 0)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "longer than" in line)
    assert "3 of 4 examples" in line and "2 left out" in line
    assert "3 of 4 examples are longer than a row of 32 tokens: truncate; 2 are left out" in (
        caplog.text
    )


def test_trained_tokens_are_green_or_marked_and_special_ones_are_visible(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_model(tmp_path)))
    ids = np.array([*tokenizer.encode("abc"), tokenizer.eos_token_id])
    trained = np.array([False, False, True, True])
    shown = coloured(ids, trained, tokenizer, marked=True)
    assert shown.plain == "ab⟦c⟧⟦<end>⟧"
    assert [str(span.style) for span in shown.spans] == ["dim", "green", "green reverse"]


def test_the_answers_of_a_pair_are_shown_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    rows = [{"prompt": "ab", "chosen": "c" * size, "rejected": "de"} for size in (1, 2, 3, 90)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        job={"task": "preference"},
        model={
            "config": str(write_model(tmp_path / "model")),
            "new_tokens": ("<|im_start|>", "<|im_end|>"),
        },
        chat={"template": "chatml"},
        data={"dataset": str(tmp_path / "data.jsonl"), "shuffle": False},
        packing={"long_examples": "drop"},
        training={"seq_len": 32, "batch_size": 1},
    )
    show_data(config, 1)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    shown = lines[:4]
    assert shown[0].startswith("example 1, chosen: ") and shown[2].startswith("example 1, rejected")
    assert shown[1].startswith("ab⟦c") and shown[3] == "ab⟦de⟧⟦<end>⟧"
    assert "longer than a row 1 of 4 pairs 1 left out" in lines
    assert "pairs a row 3.0 3 pairs in epoch" in lines
