"""The benchmark of attention kernels runs, and says what it should of kernels that are wrong."""

# ruff: noqa: E402

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from lacuna.commands import bench

interpreted = importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"
if interpreted:  # else the benchmark takes plain torch on a CPU
    import fla_on_cpu

    fla_on_cpu.interpret()

sys.path.insert(0, str(bench.DRIVERS))
benchmark = importlib.import_module("attention_kernels")


def test_it_tells_times_ratios_and_errors_of_both_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    flags = ["--tiny", "--json", str(file), *(["--tune"] if interpreted else [])]
    assert benchmark.main(flags) == 0
    assert "| 16 | forward |" in capsys.readouterr().out
    forward, backward = json.loads(file.read_text())
    for row in (forward, backward):
        assert row["ratio"] == pytest.approx(row["flash_ms"] / row["ms"])
        assert 0 < row["error"] < 5e-3 and 0 < row["flash_error"] < 5e-3


def test_documents_and_windows_are_timed_as_well() -> None:
    assert benchmark.main(["--tiny", "--documents", "3", "--kind", "rectified"]) == 0
    assert benchmark.main(["--tiny", "--window", "7"]) == 0


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = benchmark.merged_attention
    monkeypatch.setattr(
        benchmark,
        "merged_attention",
        lambda *given: right(*given).mul(1.1 if given[1].dtype != benchmark.torch.float32 else 1),
    )
    assert benchmark.main(["--tiny"]) == 1
