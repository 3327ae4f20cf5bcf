"""What gets its name is on the disk before it does: every file, then every folder of it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lacuna.config.adapters import LoraConfig
from lacuna.data.disk import replace_text
from lacuna.formats.adapter import export_adapter
from lacuna.formats.huggingface import export_model
from lacuna.formats.writer import write_checkpoint
from lacuna.model.layers.lora import add_adapters
from lacuna.parallel.processes import Process
from tiny import random_model, tiny_config, tokenizer_of_words


def entries(path: Path) -> Iterator[Path]:
    """A file, or a folder and all that is in it."""
    yield path
    yield from path.rglob("*")


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is renamed from now on, when all of it must have been synced since its last writing."""
    synced: dict[int, int] = {}
    done: list[Path] = []
    sync, replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        sync(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_mtime_ns

    def rename(source: str | Path, target: str | Path) -> None:
        lost = [
            path
            for path in entries(Path(source))
            if synced.get(path.stat().st_ino) != path.stat().st_mtime_ns
        ]
        assert lost == []
        replace(source, target)
        done.append(Path(target))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(Path, "replace", lambda self, target: rename(self, target))
    return done


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, renamed: list[Path]
) -> None:
    def describe(folder: str) -> None:
        os.makedirs(os.path.join(folder, "more"))
        Path(folder, "more", "config.json").write_text("{}")

    write_checkpoint(
        str(tmp_path / "step-1"), {"model.a": torch.ones(2)}, {"step": 1}, describe, Process()
    )
    assert tmp_path / "step-1" in renamed
    names = {path.name for path in (tmp_path / "step-1").rglob("*") if path.is_file()}
    assert names == {"__0_0.distcp", ".metadata", "state.pt", "manifest.json", "config.json"}


def test_an_exported_model_and_its_adapter_are_on_the_disk_before_they_have_their_names(
    tmp_path: Path, renamed: list[Path]
) -> None:
    model, lora = random_model(tiny_config("llama")), LoraConfig(rank=2)
    export_model(model, tokenizer_of_words(), str(tmp_path / "hf"), torch.float32)
    add_adapters(model, lora, torch.float32)
    export_adapter(model, tokenizer_of_words(), lora, None, str(tmp_path / "hf" / "adapter"))
    assert renamed == [tmp_path / "hf", tmp_path / "hf" / "adapter"]


def test_a_note_is_on_the_disk_before_it_takes_the_place_of_the_last(
    tmp_path: Path, renamed: list[Path]
) -> None:
    for text in ("first", "second"):
        replace_text(tmp_path / "finished.json", text)
        assert (tmp_path / "finished.json").read_text() == text
    assert renamed == [tmp_path / "finished.json"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["finished.json"]
