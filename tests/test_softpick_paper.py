"""The driver of softpick's paper trains its arms, measures them, and goes on where it stopped."""

import importlib
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from lacuna.commands import bench
from runs import run_to_end, write_documents
from tiny import random_model, tiny_config

sys.path.insert(0, str(bench.DRIVERS))
paper = importlib.import_module("softpick_paper")
paper_measures = importlib.import_module("paper_measures")
paper_table = importlib.import_module("paper_table")
quantised_losses = importlib.import_module("quantised_losses")


def call(
    monkeypatch: pytest.MonkeyPatch, world: Path, folder: Path, *words: object
) -> tuple[int, list[list[str]]]:
    """Makes a call whose runs are forked from here; its exit status, and what each run was told."""
    told: list[list[str]] = []

    def run_until(own: list[str], ends: float, log: Path) -> int:
        told.append(own)
        if len(told) > 1 and "--stop" in words:
            return 128 + signal.SIGTERM
        ended = run_to_end(*own)
        log.write_text(ended.output)
        return ended.status

    monkeypatch.setattr(paper, "run_until", run_until)
    given = ["softpick_paper.py", folder, "--train", world / "train.jsonl", "--tokenizer"]
    given += [world / "model", "--held-out", folder.parent / "long.jsonl", "--tiny", "--rows", 6]
    given += [word for word in words if word != "--stop"]
    monkeypatch.setattr(sys, "argv", [*map(str, given)])
    with pytest.raises(SystemExit) as ended:
        paper.main()
    return int(ended.value.code or 0), told


@pytest.mark.slow
def test_a_call_goes_on_where_the_one_before_stopped(
    monkeypatch: pytest.MonkeyPatch, world: Path, tmp_path: Path
) -> None:
    write_documents(tmp_path / "long.jsonl", random.Random(1), 40)
    folder = tmp_path / "paper"
    words = ("--arms", "softpick", "gated_softmax", "--seeds", 1, "--training.steps", 6)
    status, told = call(monkeypatch, world, folder, *words, "--stop")
    assert status == 1 and len(told) == 2
    assert (folder / "softpick-0.json").exists() and not (folder / "gated_softmax-0.json").exists()
    status, told = call(monkeypatch, world, folder, *words)
    assert status == 0 and len(told) == 1
    rows = {row["arm"]: row for row in json.loads((folder / "rows.json").read_text())}
    assert [*rows] == ["gated_softmax", "softpick"]
    for arm, row in rows.items():
        assert row["settings"]["model"]["attention"] == paper.ARMS[arm]
        assert row["steps"] == 6 and row["rows"] == 6 and row["row_tokens"] == 64
        losses = row["losses"]
        assert losses.keys() == {"none", *paper_table.FORMS}
        assert losses["none"] == pytest.approx(row["val_loss"], rel=0.05)
        assert losses["int8"] == pytest.approx(losses["none"], rel=1e-3)
        assert [one["step"] for one in row["curves"] if "attention_sparsity" in one] == [4]
        assert not (folder / f"{arm}-0" / "hf").exists()
    assert rows["softpick"]["sparsity"] > 0.1 > rows["gated_softmax"]["sparsity"]
    assert rows["softpick"]["parameters"] < rows["gated_softmax"]["parameters"]
    table = (folder / "table.md").read_text()
    assert "| softpick | 1 | 0." in table and "| 5.0% / 2.0% |" in table
    assert table.startswith("6 steps, 1,536 tokens in rows of 64, lr 0.0003; measured on 6 ")
    text = "".join(ElementTree.parse(folder / "curves.svg").getroot().itertext())
    assert "held-out loss, by bits" in text and "gated_softmax" in text
    status, told = call(monkeypatch, world, folder, *words)
    assert status == 0 and told == []


def test_seeds_of_the_paper_come_first_and_wrong_files_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], world: Path
) -> None:
    given = ["softpick_paper.py", "out", "--train", str(world / "train.jsonl"), "--held-out"]
    given += [str(world / "validation.jsonl"), "--tokenizer", str(world / "model")]
    monkeypatch.setattr(sys, "argv", given)
    made = [trial.name for trial in paper.trials(paper.arguments()[0])]
    assert made[: len(paper.ARMS)] == [f"{arm}-0" for arm in paper.ARMS]
    assert made[len(paper.ARMS) :] == ["softmax-1", "softpick-1", "softmax-2", "softpick-2"]
    monkeypatch.setattr(sys, "argv", [*given, "--trials", "softpick-2", "rectified-0"])
    chosen = paper.trials(paper.arguments()[0])
    assert [trial.name for trial in chosen] == ["softpick-2", "rectified-0"]
    monkeypatch.setattr(sys, "argv", [*given, "--trials", "softpick"])
    with pytest.raises(SystemExit):
        paper.arguments()
    monkeypatch.setattr(sys, "argv", [*given[:3], "none.jsonl", *given[4:]])
    with pytest.raises(SystemExit):
        paper.arguments()
    monkeypatch.setattr(sys, "argv", [*given[:-1], "no-folder"])
    with pytest.raises(SystemExit):
        paper.arguments()
    told = capsys.readouterr().err
    assert "softpick is no ARM-SEED" in told and "--tokenizer: there is no no-folder" in told


def a_row(arm: str, seed: int, loss: float) -> dict[str, Any]:
    """A row as softpick_paper.py writes it, of numbers that are all one."""
    numbers = dict.fromkeys(("sinks_0.2", "sinks_0.3", "kurtosis", "largest", "sparsity"), 1.0)
    counts = {"seed": seed, "steps": 4, "tokens": 256, "rows": 2, "row_tokens": 64}
    losses = dict.fromkeys(paper_table.FORMS, loss) | {"none": loss}
    settings = {"optimizer": {"lr": 1e-3}}
    row = {"arm": arm, "losses": losses, "curves": [], "settings": settings, "device": "cpu"}
    return row | counts | numbers | {"parameters": 123_600_000}


def test_rows_of_several_folders_are_told_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("all", "first", "second")]
    kept = [(1, "softmax", 0, 3.0), (2, "softmax", 1, 5.0), (2, "rectified", 0, 2.0)]
    for number, arm, seed, loss in kept:
        folders[number].mkdir(exist_ok=True)
        path = folders[number] / f"{arm}-{seed}.json"
        path.write_text(json.dumps(a_row(arm, seed, loss)))
    monkeypatch.setattr(sys, "argv", ["paper_table.py", *map(str, folders)])
    paper_table.main()
    rows = json.loads((folders[0] / "rows.json").read_text())
    assert [(row["arm"], row["seed"]) for row in rows] == [
        ("rectified", 0),
        ("softmax", 0),
        ("softmax", 1),
    ]
    table = (folders[0] / "table.md").read_text()
    assert "| softmax | 2 | 123.6M | 4.0000 ± 1.4142 | 100.0% ± 0.0% |" in table
    assert "| rectified | 1 | 123.6M | 2.0000 |" in table and "| 8.16% / 4.56% |" in table
    assert table.count("lr 0.001") == 1
    ElementTree.parse(folders[0] / "curves.svg")


def test_measured_rows_come_from_all_over_the_texts() -> None:
    rows = [torch.tensor([number]) for number in range(10)]
    assert [int(row) for row in paper_measures.evenly(rows, 4)] == [0, 2, 5, 7]
    assert paper_measures.evenly(rows, 12) == rows


def test_the_shape_has_a_hundred_million_parameters() -> None:
    shape = {key: value for key, value in paper.SHAPE.items() if isinstance(value, int)}
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    layers = shape["num_hidden_layers"] * (4 * width * width + 3 * width * inner)
    assert layers == 84_934_656
    assert layers + 32_000 * width > 1e8


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weights_are_rounded_to_the_nearest_of_their_groups_values(bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 128)
    changed = quantised_losses.rounded(weight, bits)
    for group, own in zip(changed.split(64, 1)[1], weight.split(64, 1)[1], strict=True):
        step = float(own.max() - own.min()) / (2**bits - 1)
        assert len(group.unique()) <= 2**bits
        assert float((group - own).abs().max()) <= step / 2 * (1 + 1e-4)


def test_a_model_is_left_as_it_was_and_fewer_bits_lose_more() -> None:
    model: Any = random_model(tiny_config("llama"))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = [(torch.arange(20) * step) % 90 + 4 for step in (3, 7)]
    losses = quantised_losses.losses_by_bits(model, rows)
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    ids = torch.stack(rows)
    assert losses["none"] == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-5)
    errors = [abs(losses[f"rtn{bits}"] - losses["none"]) for bits in (8, 4, 2)]
    assert errors == sorted(errors) and errors[0] > 0
