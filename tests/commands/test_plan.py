"""`lacuna plan` says what `train --dry-run` does, for any world; --draw leaves only a picture."""

from pathlib import Path

from runs import lacuna, run_to_end, together

PIPELINE = (
    "--parallelism.pipeline_parallel_degree",
    2,
    "--parallelism.pipeline_parallel_microbatches",
    4,
)


def test_the_drawing_shows_mesh_and_timeline_and_leaves_nothing_but_the_picture(
    world: Path, tmp_path: Path
) -> None:
    shard = (
        "--parallelism.data_parallel_shard_degree",
        2,
        "--parallelism.tensor_parallel_degree",
        2,
    )
    text = lacuna("plan", world / "run.toml", "--draw", *PIPELINE, *shard, cwd=tmp_path)
    assert "pp 2 × dp_replicate 1 × dp_shard 2 × cp 1 × tp 2" in text, (
        "as many ranks as the degrees make"
    )
    assert "embedding, 0" in text and "1–1, head" in text and "1, 0, 1, 0, 1" in text
    assert "pp 0   F0 F1 ·  ·  B0─── F2 " in text and "pp 1   ·  F0 B0─── " in text
    assert "wait (·) 20.0% of the time: the bubble." in " ".join(text.split())
    left = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert left == [Path("outputs/run/plan.svg")]


def test_any_number_of_processes_is_planned_for(world: Path, tmp_path: Path) -> None:
    same = ("--job.dump_folder", tmp_path / "run")
    shares = (
        "--parallelism.tensor_parallel_degree",
        2,
        "--parallelism.pipeline_parallel_degree",
        2,
    )
    planned, dry, on_gpus, drawn = together(
        lambda: lacuna("plan", world / "run.toml", "--cpus", 64, *same),
        lambda: lacuna("train", world / "run.toml", "--cpus", 64, "--dry-run", *same),
        lambda: lacuna("plan", world / "run.toml", "--gpus", 64, *shares, *same),
        lambda: lacuna(
            "plan",
            world / "run.toml",
            "--draw",
            "--gpus",
            64,
            "--job.dump_folder",
            tmp_path / "drawn",
        ),
    )
    assert (
        planned == dry and "64 on cpu: dp_replicate 1 × dp_shard 64 × cp 1 × tp 1 × pp 1" in planned
    )
    assert "64 on cuda: dp_replicate 1 × dp_shard 16 × cp 1 × tp 2 × pp 2" in on_gpus
    assert "bfloat16 compute" in on_gpus and "memory a rank" in on_gpus
    assert "dp_shard 64" in drawn and "… 64 ranks, all in plan.svg" in drawn and "bfloat16" in drawn
    assert [path.name for path in tmp_path.iterdir()] == ["drawn"]


def test_what_cannot_be_drawn_is_refused_in_one_message(world: Path, tmp_path: Path) -> None:
    run = ("plan", world / "run.toml", "--draw", "--job.dump_folder", tmp_path / "run", *PIPELINE)
    outcome = run_to_end(*run, "--parallelism.pipeline_parallel_schedule_csv", "absent.csv")
    assert (
        outcome.status == 2 and "absent.csv cannot run on 2 ranks: No such file" in outcome.output
    )
    assert outcome.output.count("lacuna: ") == 1 and "Traceback" not in outcome.output


def test_help_names_the_options() -> None:
    text = lacuna("plan", "--help")
    assert all(option in text for option in ("--draw", "plan.svg", "--gpus N"))
