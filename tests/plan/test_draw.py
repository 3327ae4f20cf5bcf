"""The drawing shows what each rank holds and when it works, on any screen and in the picture.

Its timeline keeps to the schedule's order and waits for inputs; its bubble is the textbook's.
"""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lacuna.config import Config, UserError
from lacuna.config.machine import SCHEDULES, ParallelismConfig
from lacuna.parallel.schedule import Action, held_stages, pipeline_order
from lacuna.plan.draw import UNITS, bubble_share, draw, makespan, simulate
from layouts import pipeline
from runs import write_model

Drawing = Callable[..., list[str]]
LAYERS = 8


@pytest.fixture
def drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Drawing:
    """Draws a run of a tiny model of eight layers; returns lines for a screen of some width."""

    def lines(
        processes: int,
        width: int = 150,
        model: dict[str, object] | None = None,
        **parallelism: object,
    ) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        config = Config(
            job={"name": "run", "dump_folder": str(tmp_path / "run")},
            model={
                "config": str(
                    write_model(tmp_path / "model", num_hidden_layers=LAYERS, **(model or {}))
                )
            },
            training={"seq_len": 64, "batch_size": 12},
            parallelism=ParallelismConfig(**parallelism),
        )
        draw(config, processes, "cpu")
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return lines


def picture(folder: Path) -> list[str]:
    """The lines of text in the picture, where a letter is 12.2 wide."""
    lines: dict[str, str] = {}
    for element in ElementTree.parse(folder / "run" / "plan.svg").iter(
        "{http://www.w3.org/2000/svg}text"
    ):
        height, column = element.attrib["y"], round(float(element.attrib["x"]) / 12.2)
        lines[height] = lines.get(height, "").ljust(column) + (element.text or "").replace(
            "\xa0", " "
        )
    return list(lines.values())


def table(lines: list[str]) -> list[list[str]]:
    """The cells of lines that begin with a rank."""
    return [re.split(r" {2,}", line.strip()) for line in lines if re.match(r" *\d+ +\d", line)]


def numbers(spans: str) -> list[int]:
    """The numbers of spans such as 0–3, 12–15."""
    ends = [part.split("–") for part in spans.split(", ")]
    return [number for first, last in ends for number in range(int(first), int(last) + 1)]


def test_ranks_are_numbered_as_the_mesh_is_and_share_out_layers_rows_and_tokens(
    drawn: Drawing, tmp_path: Path
) -> None:
    lines = drawn(
        32,
        data_parallel_replicate_degree=2,
        data_parallel_shard_degree=2,
        context_parallel_degree=2,
        tensor_parallel_degree=2,
        pipeline_parallel_degree=2,
    )
    rows = table(lines)
    assert rows == table(picture(tmp_path))
    assert "pp 2 × dp_replicate 2 × dp_shard 2 × cp 2 × tp 2, the last axis fastest" in " ".join(
        lines
    )
    assert [row[0] for row in rows] == [str(rank) for rank in range(32)]
    assert [row[1] for row in rows] == [
        ", ".join(map(str, place)) for place in product(range(2), repeat=5)
    ]
    first, last = rows[0][2], rows[31][2]
    assert {row[2] for row in rows[:16]} == {first} and {row[2] for row in rows[16:]} == {last}
    assert numbers(first.removeprefix("embedding, ")) + numbers(last.removesuffix(", head")) == [
        *range(LAYERS)
    ]
    assert [numbers(row[4]) for row in rows[:16:4]] == [
        [*range(start, start + 12)] for start in (0, 12, 24, 36)
    ]
    assert [row[5] for row in rows[:4]] == [
        "chunks 0, 3 of 4",
        "chunks 0, 3 of 4",
        "chunks 1, 2 of 4",
        "chunks 1, 2 of 4",
    ]


@pytest.mark.parametrize(
    ("tied", "degrees", "schedule"),
    [
        (False, (1, 1, 1), "1F1B"),
        (True, (4, 2, 1), "1F1B"),
        (False, (2, 1, 2), "DualPipeV"),
        (True, (1, 1, 2), "1F1B"),
    ],
)
def test_the_parameters_of_the_ranks_are_the_models(
    tied: bool, degrees: tuple[int, int, int], schedule: str, drawn: Drawing, tmp_path: Path
) -> None:
    """Where the embedding is the head as well, either end of a pipeline has it."""
    shard, tensor, stages = degrees
    rows = table(
        drawn(
            shard * tensor * stages,
            model={"vocab_size": 200_000, "tie_word_embeddings": tied},
            tensor_parallel_degree=tensor,
            pipeline_parallel_degree=stages,
            pipeline_parallel_schedule=schedule,
        )
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "model"))
    expected = model.num_parameters() + (200_000 * 64 if tied and stages > 1 else 0)
    assert sum(float(row[3].removesuffix(" M")) for row in rows) == pytest.approx(
        expected / 1e6, abs=0.005 * len(rows)
    )


def test_resharding_is_counted_for_this_run(drawn: Drawing) -> None:
    text = " ".join(drawn(4))
    assert (
        "8,192 parameters of mlp.gate_proj.weight in a layer, a rank computes with 1/1 (tp)" in text
    )
    assert "stores 1/4 of that (fsdp): 2,048." in text
    assert (
        "its 4 shards" in text
        and "8 times a step" in text
        and "up to 16" in text
        and "gives them back." in text
    )
    assert "This run keeps them." in " ".join(drawn(4, zero_stage=2))
    assert "This run has but one shard." in " ".join(drawn(1))
    pipelined = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatches": 3}
    text = " ".join(drawn(4, **pipelined))
    assert "4 times a step" in text and "up to 24" in text and "This run keeps them." in text
    assert "This run gives them back." in " ".join(
        drawn(4, fsdp_reshard_after_forward="always", **pipelined)
    )


def test_the_timeline_shows_waiting_and_the_bubble_and_is_whole_in_the_picture(
    drawn: Drawing, tmp_path: Path
) -> None:
    pipelined = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatches": 4}
    lines = drawn(2, **pipelined)
    assert "4 micro-batches take 15 units" in " ".join(
        lines
    ) and "wait (·) 20.0% of the time" in " ".join(lines)
    assert [line for line in lines if line.startswith("pp ")] == [
        "pp 0   F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── ·  B3───",
        "pp 1   ·  F0 B0─── F1 B1─── F2 B2─── F3 B3─── ·  ·",
    ]
    narrow = drawn(2, width=40, **pipelined)
    assert max(map(len, narrow[:-1])) <= 40, "all but the path"
    assert any(line.startswith("pp 1   ·  F0") and line[-1] == "…" for line in narrow)
    drawing = (tmp_path / "run" / "plan.svg").read_text()
    assert any("B3" in line for line in picture(tmp_path) if line.startswith("pp 1"))
    assert drawing.count('fill="#9ecbff"') == drawing.count('fill="#a6e3a1"') == 8
    assert "@font-face" not in drawing and "url(h" not in drawing, "nothing from elsewhere"
    text = " ".join(drawn(2, pipeline_parallel_degree=2, pipeline_parallel_schedule="DualPipeV"))
    assert " f0" in text and " i3" in text and " W3" in text


def test_of_many_ranks_the_first_are_listed_and_all_are_in_the_picture(
    drawn: Drawing, tmp_path: Path
) -> None:
    lines = drawn(96, pipeline_parallel_degree=4, tensor_parallel_degree=2)
    assert len(table(lines)) == 32 and "… 96 ranks, all in plan.svg" in lines
    assert [row[0] for row in table(picture(tmp_path))] == [str(rank) for rank in range(96)]


def test_what_the_run_would_refuse_is_refused(drawn: Drawing, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="but there are 7 processes"):
        drawn(7, pipeline_parallel_degree=2)
    with pytest.raises(UserError, match="12 stages, more than the 8 layers"):
        drawn(6, pipeline_parallel_degree=6, pipeline_parallel_schedule="DualPipeV")
    file = tmp_path / "own.csv"
    file.write_text("0F0,0Z0\n1F0,1B0\n")
    with pytest.raises(UserError, match="own.csv:1: '0Z0' is no action"):
        drawn(2, pipeline_parallel_degree=2, pipeline_parallel_schedule_csv=str(file))
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match="job.dump_folder: cannot write"):
        drawn(1)


def test_a_schedule_of_a_file_is_drawn(drawn: Drawing, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    text = " ".join(drawn(2, pipeline_parallel_degree=2, pipeline_parallel_schedule_csv=str(file)))
    assert "2 micro-batches take 9 units" in text and "33.3% of the time" in text


def timeline_of(schedule: str, ranks: int, microbatches: int) -> dict[int, dict[Action, int]]:
    return simulate(pipeline_order(pipeline(schedule, ranks), microbatches))


@pytest.mark.parametrize(
    ("schedule", "ranks", "rounds"),
    product(("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"), (2, 3, 8), (1, 2, 5)),
)
def test_the_bubble_is_the_textbooks(schedule: str, ranks: int, rounds: int) -> None:
    """(p - 1) / (v m + p - 1), where B is kept whole (Narayanan et al. 2021, section 2.2)."""
    microbatches, order = 2 * ranks * rounds, pipeline_order(pipeline(schedule, ranks))
    share = bubble_share(timeline_of(schedule, ranks, microbatches))
    assert share == pytest.approx(
        (ranks - 1) / (len(held_stages(order)[0]) * microbatches + ranks - 1)
    )


@pytest.mark.parametrize("ranks", (2, 4))
def test_two_stages_per_rank_wait_less_and_split_backward_passes_less_still(ranks: int) -> None:
    shares = {
        schedule: bubble_share(timeline_of(schedule, ranks, 4 * ranks)) for schedule in SCHEDULES
    }
    assert shares["Interleaved1F1B"] < 0.6 * shares["1F1B"]
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert 0 < shares[schedule] < 0.5 * shares["Interleaved1F1B"]


@pytest.mark.parametrize(("schedule", "ranks"), product(SCHEDULES, (2, 3, 4)))
def test_every_action_starts_as_soon_as_its_rank_is_free_and_its_inputs_are_there(
    schedule: str, ranks: int
) -> None:
    order = pipeline_order(pipeline(schedule, ranks), 4 * ranks)
    timeline = simulate(order)
    assert {rank: list(ends) for rank, ends in timeline.items()} == order
    assert UNITS == {"F": 1, "B": 2, "I": 1, "W": 1}
    every = {action: end for ends in timeline.values() for action, end in ends.items()}
    for ends in timeline.values():
        free = 0
        for (stage, kind, microbatch), end in ends.items():
            inputs = {
                "F": [Action(stage - 1, "F", microbatch)],
                "W": [Action(stage, "I", microbatch)],
            }.get(
                kind,
                [
                    Action(stage, "F", microbatch),
                    *(Action(stage + 1, half, microbatch) for half in "BI"),
                ],
            )
            assert end - UNITS[kind] == max([free, *(every.get(action, 0) for action in inputs)])
            free = end


def test_gpipe_takes_three_units_for_each_microbatch_and_hop() -> None:
    assert makespan(timeline_of("GPipe", 2, 4)) == (4 + 1) * 3
