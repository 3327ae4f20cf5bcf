"""What is odd in a run folder is said in one message, or passed over with one."""

import os
from pathlib import Path

import pytest

from lacuna.config import UserError
from lacuna.config.machine import CheckpointConfig
from lacuna.config.sections import TrainingConfig
from lacuna.train.metrics import _open_rows
from lacuna.train.session import finished_run, lock

ODD = {
    "cut": b'{"step": 2, "lo',
    "cut and ended": b'{"step": 2, "lo\n',
    "not UTF-8": b'{"step": 2, "loss": "\xff"}\n',
    "another thing": b"[2]\n",
    "without a step": b'{"loss": 1.0}\n',
    "empty": b"\n",
}


@pytest.mark.parametrize("odd", ODD)
def test_lines_that_are_no_rows_are_told_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, odd: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    first, third, fourth = (f'{{"step": {step}}}\n'.encode() for step in (1, 3, 4))
    path.write_bytes(
        first
        + (b"" if odd == "cut" else ODD[odd] + third + fourth)
        + (ODD[odd] if odd == "cut" else b"")
    )
    with _open_rows(str(path), 3) as file:
        file.write("more\n")
    assert path.read_bytes() == first + (b"" if odd == "cut" else third) + b"more\n"
    told = f"{path}: line 2 is no row; 1 such lines are left out"
    assert (told in caplog.text) == (odd != "cut"), "a cut end is what a kill leaves"


def test_a_damaged_note_of_the_end_is_told_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, settings = TrainingConfig(steps=8), CheckpointConfig()
    note = tmp_path / "finished.json"
    note.write_text('{"step": 8, "steps": 8, "epochs": null}')
    assert finished_run(str(tmp_path), settings, wanted) == {"step": 8, "steps": 8, "epochs": None}
    for odd in ('{"step": 8, "st', "[]", '{"step": 8}', ""):
        note.write_text(odd)
        assert finished_run(str(tmp_path), settings, wanted) is None
    assert caplog.text.count(f"{note} is damaged: the run goes on from its newest checkpoint") == 4


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    nowhere = ["/proc/run", "/sys/kernel"] if os.path.isdir("/sys/kernel") else []
    (tmp_path / "file").write_text("")
    for folder in (*nowhere, str(tmp_path / "file"), str(tmp_path / "file" / "run")):
        with pytest.raises(
            UserError,
            match=f"job.dump_folder: cannot write to '{folder}': .*; choose another folder",
        ):
            lock(folder)
