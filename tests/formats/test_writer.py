"""What goes wrong while a checkpoint is written is told apart: the disk's fault, or ours."""

from pathlib import Path

import pytest
import torch

from lacuna.config import RunError
from lacuna.formats.huggingface import save_tokenizer
from lacuna.formats.writer import write_checkpoint
from lacuna.parallel.processes import Process
from tiny import tokenizer_of_words


def write(path: Path, error: Exception) -> None:
    """Writes a checkpoint whose description ends in this error."""

    def describe(folder: str) -> None:
        raise error

    tensors = {"model.a": torch.ones(2)}
    write_checkpoint(str(path), tensors, {"loop": {"step": 1}}, describe, Process())


def test_a_disk_that_refuses_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot write the checkpoint .*: no space left"):
        write(tmp_path / "step-1", OSError("no space left"))
    assert [*tmp_path.iterdir()] == []


def test_a_mistake_of_our_own_is_not_taken_for_the_disks(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a mistake"):
        write(tmp_path / "step-1", TypeError("a mistake"))


def test_what_the_disk_says_to_a_tokenizer_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of_words()

    def refuse(folder: str) -> None:
        raise Exception("File too large (os error 27)")  # as the package tokenizers does

    monkeypatch.setattr(tokenizer, "save_pretrained", refuse)
    with pytest.raises(OSError, match="File too large"):
        save_tokenizer(tokenizer, str(tmp_path))
