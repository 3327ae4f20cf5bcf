"""The benchmark of losses and layers runs, and its kernels compute the same."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from lacuna.commands import bench

sys.path.insert(0, str(bench.DRIVERS))
benchmark = importlib.import_module("layer_kernels")


def test_it_tells_times_and_errors_of_losses_and_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    assert benchmark.main(["--tiny", "--json", str(file)]) == 0
    assert "| loss, 8B | all logits |" in capsys.readouterr().out
    rows = json.loads(file.read_text())
    assert {row["what"] for row in rows} == {*(f"loss, {one}" for one in ("1B", "0.6B", "8B"))} | {
        "RMSNorm",
        "SwiGLU",
    }
    for row in rows:
        assert row["ms"] > 0 and row["error"] < 1e-6


def test_a_wrong_kernel_has_a_large_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = benchmark.layers
    wrong = {"SwiGLU": {"wrong": lambda gate, up: gate * up}}
    monkeypatch.setattr(benchmark, "layers", lambda is_gpu: right(is_gpu) | wrong)
    given = benchmark.parse(["--tiny"])
    rows = benchmark.measure_layers(given, "cpu", benchmark.torch.float32)
    assert [row["error"] for row in rows if row["what"] == "SwiGLU"][0] > 0.1
