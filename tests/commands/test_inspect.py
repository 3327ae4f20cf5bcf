"""`lacuna inspect` tells of every layer, in numbers and as a picture."""

import json
from pathlib import Path

from runs import lacuna, refused


def test_it_tells_of_every_layer_of_a_run(straight: Path, world: Path, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "a.json", "--picture", tmp_path / "a.svg")
    told = lacuna("inspect", straight, "--data", world / "train.jsonl", *files, "--tokens", 64)
    assert "8 rows of 64 tokens, attention sdpa" in told
    layers = json.loads((tmp_path / "a.json").read_text())
    assert len(layers) == 2 and all(len(layer["first"]) == 4 for layer in layers)
    mean = sum(sum(layer["first"]) for layer in layers) / 8
    assert f"all  {mean:>11.3f}" in told
    picture = (tmp_path / "a.svg").read_text()
    assert picture.count("<rect") == 8 and "layer 1, head 3" in picture


def test_it_reads_something_by_itself(straight: Path) -> None:
    assert "1 rows of 32 tokens" in lacuna("inspect", straight, "--rows", 1, "--tokens", 32)


def test_what_it_cannot_read_is_refused(straight: Path, tmp_path: Path) -> None:
    assert "--rows must be at least 1" in refused("inspect", straight, "--rows", "0")
    assert "cannot read" in refused("inspect", straight, "--data", tmp_path / "none.txt")
    (tmp_path / "bad.jsonl").write_text('{"no": 1}\n')
    assert "cannot read" in refused("inspect", straight, "--data", tmp_path / "bad.jsonl")
    (tmp_path / "short.txt").write_text("a")
    assert "has no two tokens" in refused("inspect", straight, "--data", tmp_path / "short.txt")


def test_where_it_cannot_write_is_told_before_a_model_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for option, place in (("--json", "file/a.json"), ("--picture", "file/a.svg")):
        said = refused("inspect", "no/such/model", option, tmp_path / place)
        assert f"inspect: {option}: cannot write" in said and "is a file" in said
    assert "name a file" in refused("inspect", "no/such/model", "--json", tmp_path)


def test_folders_of_what_it_writes_are_made(straight: Path, tmp_path: Path) -> None:
    file = tmp_path / "no" / "such" / "folder.json"
    lacuna("inspect", straight, "--rows", 1, "--tokens", 16, "--json", file)
    assert len(json.loads(file.read_text())) == 2


def test_a_picture_of_another_kind_is_refused(trained: Path, tmp_path: Path) -> None:
    assert "ends in .svg" in refused("inspect", trained / "hf", "--picture", tmp_path / "a.png")
