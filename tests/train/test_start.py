"""A start says what its time went into, and what it compiled is there for the next one."""

import re
from pathlib import Path

import pytest

from runs import environment, start_anew


def said_of_start(world: Path, folder: Path, **variables: str) -> str:
    """What a new process says of a run of one step whose layers are compiled."""
    settings = environment(**variables)
    settings.pop("TORCHINDUCTOR_CACHE_DIR", None)  # which torch sets when it is imported
    process = start_anew(
        "train",
        world / "run.toml",
        "--job.dump_folder",
        folder,
        "--training.steps",
        1,
        "--compile.enable",
        "true",
        env=settings,
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return str(output)


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_says_where_its_time_went(
    world: Path, tmp_path: Path
) -> None:
    caches = tmp_path / "caches"
    before: set[Path] = set()
    for number in range(2):
        output = said_of_start(world, tmp_path / str(number), XDG_CACHE_HOME=str(caches))
        kept = {path for path in (caches / "lacuna" / "compiled").rglob("*") if path.is_file()}
        assert kept and (not before or kept == before)
        before = kept
    found = re.search(r"step 1 was done ([\d.]+) s after the start \((.*)\)", output)
    assert found is not None, output
    phases = {name: float(seconds) for name, seconds in re.findall(r"([a-z ]+) ([\d.]+)", found[2])}
    assert [name.strip() for name in phases] == [
        "libraries",
        "data",
        "model",
        "preparation",
        "first step",
    ]
    assert sum(phases.values()) == pytest.approx(float(found[1]), abs=0.3)


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_written_to_stops_no_run(world: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    said_of_start(world, tmp_path / "run", XDG_CACHE_HOME=str(file))
