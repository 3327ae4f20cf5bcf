"""What `lacuna data` shows are the examples of the first step, and nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest

from lacuna.config import Config
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
    assert "longer than a row 1 of 4 pairs left out" in lines
    assert "pairs a row 3.0 3 pairs in epoch" in lines
