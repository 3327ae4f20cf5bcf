"""The comparison of float8 with bfloat16: all runs by one command, a table and a picture."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.dom import minidom

import pytest

from lacuna.commands import bench
from runs import environment


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_float8_learns_beside_bfloat16_by_one_command(tmp_path: Path) -> None:
    command = [sys.executable, bench.DRIVERS / "float8_losses.py", "--tiny", "--output", tmp_path]
    command.append("--experts")  # beside which linear layers are in float8 as well
    ended = subprocess.run(
        [*map(str, command)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    runs = json.loads((tmp_path / "float8.json").read_text())["runs"]
    recipes = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
    assert [run["arm"] for run in runs] == ["bfloat16", "bfloat16", *recipes]
    curves = [tuple(loss for _, loss in run["loss"]) for run in runs]
    assert len(set(curves)) == 5, "all runs differ"
    first, *others = (losses[0] for losses in (curves[0], *curves[2:]))
    assert others == pytest.approx([first] * 3, rel=1e-2), "they begin with the same weights"
    assert (tmp_path / "float8.md").read_text() in ended.stdout
    of_rows = (tmp_path / "rowwise-0.log").read_text()
    assert "in 8 linear layers and 4 stacks of experts" in of_rows
    drawn = minidom.parse(str(tmp_path / "float8.svg")).getElementsByTagName("polyline")
    assert len(drawn) == 6 + 5
