"""The table of benchmarks: its rows are runs, their peers can make them, and a call makes it."""

import importlib
import json
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from lacuna.commands import bench
from lacuna.config import UserError
from lacuna.config.parse import load_config
from lacuna.data.corpus import stdlib_tokenizer
from runs import environment

sys.path.insert(0, str(bench.DRIVERS))
comparable = importlib.import_module("comparable")
rows = importlib.import_module("rows")
conversations = importlib.import_module("row_conversations")
table = importlib.import_module("table")

PEER = {
    "torchtitan": find_spec("torchtitan") and find_spec("triton"),
    "transformers": True,
    "automodel": find_spec("nemo_automodel"),
    "fla": False,  # its kernels need a GPU
}


@pytest.mark.parametrize("name", rows.ROWS)
def test_a_row_is_a_run_that_its_peer_can_make(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparable, "find_spec", lambda name: True)
    row = rows.ROWS[name]
    if row.against == "fla":
        pytest.importorskip("fla")
    row.write_model(tmp_path)
    if row.conversations:
        conversations.write_conversations(tmp_path, 2)
    file = tmp_path / "row.toml"
    file.write_text(rows.toml(row, str(tmp_path)))
    config = load_config(str(file), [])
    assert config.training.seq_len == row.size[1]
    if row.against:
        comparable.require_comparable(config, row.against, row.processes, "cuda")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": {"dataset": "python-stdlib"}}, "document_mask"),
        ({"training": {"varlen": True}}, "varlen"),
        ({"activation_checkpoint": {"mode": "selective"}}, "selective_ac_option"),
        ({"parallelism": {"data_parallel_replicate_degree": 2}}, "data_parallel_replicate_degree"),
        ({"quantization": {"base": "nf4"}, "lora": {"rank": 4}}, "quantization.base=nf4"),
        ({"lora": {"rank": 4, "dropout": 0.1}}, "lora.dropout=0.1"),
        ({"lora": {"rank": 4}} | rows.BY_OPERATION, "change in place"),
        ({"parallelism": {"tensor_parallel_degree": 2}}, "tensor_parallel_degree=2"),
    ],
)
def test_what_automodel_cannot_make_is_refused(
    settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparable, "find_spec", lambda name: True)
    file = tmp_path / "row.toml"
    row = replace(rows.ROWS["llama-1b-automodel"], settings=rows.WHOLE_ROWS | settings)
    row.write_model(tmp_path)
    file.write_text(rows.toml(row, str(tmp_path)))
    with pytest.raises(UserError, match=words):
        comparable.require_comparable(load_config(str(file), []), "automodel", 2, "cuda")


def test_automodel_in_one_process_needs_adapters_or_weights_as_they_are_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparable, "find_spec", lambda name: True)
    file = tmp_path / "row.toml"
    rows.ROWS["llama-1b-automodel"].write_model(tmp_path)
    file.write_text(rows.toml(rows.ROWS["llama-1b-automodel"], str(tmp_path)))
    with pytest.raises(UserError, match="casts nothing to bfloat16"):
        comparable.require_comparable(load_config(str(file), []), "automodel", 1, "cuda")
    with_adapters = ["--lora.rank", "4", "--activation_checkpoint.mode", "full"]
    for flags in (with_adapters, ["--training.dtype", "bfloat16"]):
        comparable.require_comparable(load_config(str(file), flags), "automodel", 1, "cuda")


def test_ways_of_experts_are_timed_and_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where what is asked of the GPU is nothing."""
    steps = importlib.import_module("transformers_steps")
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    sizes = {name: size for name, size in rows.TINY_PARTS.items() if name != "head_dim"}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**rows.TINY, **sizes, head_dim=16))
    ids = torch.arange(32).view(1, -1)
    settings = {"dtype": "float32", "compute": "bfloat16", "processes": 1, "device": "cpu"}
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids}
    task = SimpleNamespace(settings=settings, tokens=[batch], is_on_gpu=True)
    assert steps.needs_choice_of_experts(model, task)
    steps.choose_experts(model, task)
    assert model.config._experts_implementation in ("eager", "grouped_mm")
    assert all(weight.grad is None for weight in model.parameters())
    settings["processes"] = 2
    assert not steps.needs_choice_of_experts(model, task)
    dense = AutoModelForCausalLM.from_config(Qwen3Config(**rows.TINY, head_dim=16))
    settings["processes"] = 1
    assert not steps.needs_choice_of_experts(dense, task)


def test_ways_of_experts_are_timed_where_the_steps_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = importlib.import_module("transformers_steps")
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    sizes = {name: size for name, size in rows.TINY_PARTS.items() if name != "head_dim"}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**rows.TINY, **sizes, head_dim=16))
    found = []

    def note(model: PreTrainedModel, *_: object) -> float:
        found.append(model.device.type)
        return 1.0

    monkeypatch.setattr(steps, "seconds_of_passes", note)
    # Files of weights are opened on the CPU, whatever computes the steps.
    steps.choose_experts(model, SimpleNamespace(settings={"device": "meta"}))
    assert found == ["meta", "meta"]


def test_rows_of_flas_loop_have_bounds_and_labels_as_fla_shifts_them() -> None:
    steps = importlib.import_module("fla_steps")
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]),
        "position_ids": torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]]),
        "labels": torch.tensor([[6, 7, -100, -100], [10, -100, 12, -100]]),
    }
    row = steps.whole_rows(batch)
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]
    assert row["cu_seqlens"].tolist() == [0, 3, 4, 6, 8]
    assert row["labels"].tolist() == [[-100, 6, 7, -100, -100, 10, -100, 12]]


def test_conversations_have_about_a_thousand_tokens(tmp_path: Path) -> None:
    conversations.write_conversations(tmp_path, 50)
    tokenizer = stdlib_tokenizer()
    lines = (tmp_path / "conversations.jsonl").read_text().splitlines()
    lengths = [
        sum(len(tokenizer.encode(one["content"])) for one in json.loads(line)["messages"])
        for line in lines
    ]
    assert len(lengths) == 50
    assert 800 < sum(lengths) / len(lengths) < 1200


def record(speed: float, peer: float) -> dict[str, Any]:
    def side(value: float, gib: float) -> dict[str, Any]:
        speeds = {"median": value, "spread": 0.1}
        return {"tokens_per_second": speeds, "memory_gib": {"reserved": gib}, "mfu": None}

    return {
        "device": {"processes": 2, "name": "GPU"},
        "lacuna": side(speed, 4.0) | {"mfu": {"median": 0.5}},
        "torchtitan": side(peer, 5.0),
        "ratio": {"tokens_per_second": speed / peer, "memory": 0.8},
    }


def test_a_row_is_told_with_its_ratio_over_the_repeats() -> None:
    records = [record(1100, 1000), record(1250, 1000), record(1200, 1000)]
    told = table.told(table.summary("half-8b", rows.ROWS["half-8b"], records))
    assert told == (
        "| half-8b | 1,200 | torchtitan | 1,000 | 1.200 × (1.100 to 1.250) | 4.00 | 5.00 | 0.800 × "
        "| 50.0% | 3 |"
    )
    alone = table.told(table.summary("qwen3-sft", rows.ROWS["qwen3-sft"], records[:1]))
    assert alone == "| qwen3-sft | 1,100 | – | – | – | 4.00 | – | – | 50.0% | 1 |"
    assert told.count("|") == alone.count("|") == len(table.COLUMNS) + 1


def test_what_takes_too_long_is_stopped(tmp_path: Path) -> None:
    began = time.monotonic()
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert table.run_until(words, began + 0.5, tmp_path / "log") is None
    assert time.monotonic() - began < 20
    assert table.run_until([sys.executable, "-c", "exit(3)"], began + 60, tmp_path / "log") == 3


def test_what_a_failed_repeat_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the peer fails, our record is there, and its log says why."""

    def fails(words: list[str], ends: float, log: Path) -> int:
        folder = Path(words[words.index("--output") + 1])
        (folder / "half-8b.json").write_text("ours")
        (folder / "half-8b.torchtitan.log").write_text("out of memory")
        log.write_text("failed")
        return 1

    monkeypatch.setattr(table, "run_until", fails)
    given = SimpleNamespace(tiny=True, steps=1, repeats=3, limit_seconds=60.0, output=str(tmp_path))
    runs, problem = table.measured("half-8b", rows.ROWS["half-8b"].shrunk(), given)
    assert runs == [] and "failed in repeat 1" in problem
    assert (tmp_path / "left-half-8b.json").read_text() == "ours"
    assert (tmp_path / "left-half-8b.torchtitan.log").read_text() == "out of memory"


def make(folder: Path, *words: object) -> tuple[int, str]:
    """Runs the command of the table on small rows; its exit status and output."""
    command = [sys.executable, bench.DRIVERS / "table.py", "--tiny", "--output", folder, *words]
    path = ":".join(filter(None, [str(bench.DRIVERS.parent / "src"), *sys.path]))
    ended = subprocess.run(
        [*map(str, command)],
        env=environment(PYTHONPATH=path, TORCHAO_FORCE_SKIP_LOADING_SO_FILES="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ended.returncode, ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(not PEER["torchtitan"], reason="torchtitan or triton is not installed")
def test_every_row_is_made_small(tmp_path: Path) -> None:
    names = [
        name
        for name, row in rows.ROWS.items()
        if PEER.get(row.shrunk().against, True) and ("float8" not in name or find_spec("torchao"))
    ]
    status, output = make(tmp_path, "--repeats", 1, *names)
    assert status == 0, output
    made = json.loads((tmp_path / "table.json").read_text())
    assert list(made) == names
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len(lines) == 2 + len(names)
    for line in lines:
        assert line in output
    for name, row in made.items():
        against = rows.ROWS[name].shrunk().against
        assert row["peer"] == against
        assert row["tokens_per_second"]["median"] > 0
        assert not against or row["runs"][0][against]["first_loss"] == pytest.approx(
            row["runs"][0]["lacuna"]["first_loss"], abs=2e-2
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)  # several whole benchmarks
def test_a_row_in_turn_with_its_peer_and_one_that_is_stopped(tmp_path: Path) -> None:
    status, output = make(tmp_path, "--repeats", 2, "qwen3-sft-trainer")
    assert status == 0, output
    assert len(json.loads((tmp_path / "table.json").read_text())["qwen3-sft-trainer"]["runs"]) == 2
    status, output = make(tmp_path, "--limit-seconds", 1, "qwen3-sft")
    assert status == 1
    assert "qwen3-sft: stopped after 1 s, in repeat 1" in output
    assert list(json.loads((tmp_path / "table.json").read_text())) == ["qwen3-sft-trainer"]


def test_a_listed_row_is_a_toml() -> None:
    text = rows.toml(rows.ROWS["half-8b-float8"], "folder")
    assert tomllib.loads(text)["float8"]["enable_fsdp_float8_all_gather"] is True


@pytest.mark.slow
def test_ways_of_generating_are_measured_side_by_side() -> None:
    """Those that compile take longer than a test may."""
    ways = ["graph", "eager", "static", "plain"]
    program = Path(bench.DRIVERS, "generation.py")
    words = [sys.executable, str(program), "--tiny", "--case", "kernel", "uneven", "--only", *ways]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=True)
    said = done.stdout
    assert said.count("differs by 0.0") == 2, said
    assert all(f"\n{way} " in said for way in ways) and said.count("tokens/s") == 4, said
    assert said.count("largest 0.0") == 4, "log-probabilities of both engines in both dtypes"
