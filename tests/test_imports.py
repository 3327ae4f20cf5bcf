"""A run imports no more than it needs, and Python keeps the libraries' bytecode between runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import environment

NOT_NEEDED = (
    # torch's compiler, which is for layers that are compiled
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "networkx",
    # what only a setting asks for
    "bitsandbytes",
    "gguf",
    "peft",
    "tensorboard",
    "wandb",
    # what transformers imports where it is installed
    "matplotlib",
    "scipy",
    "sklearn",
    "torchao",
    "torchvision",
)

RUN = """
import gc, sys
from lacuna.cli import main

status = main(sys.argv[1:])
print("imported:", *sorted(sys.modules))
print("collects garbage:", gc.isenabled(), gc.get_freeze_count() > 100_000)
raise SystemExit(status)
"""

KEEP = """
import sys
from lacuna.imports import keep_bytecode

keep_bytecode()
import torch

print(sys.pycache_prefix, sys.dont_write_bytecode, torch.__cached__)
"""


def install(folder: Path, name: str, version: str, code: str = "") -> None:
    """Makes a package as pip would, without bytecode."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    note = folder / f"{name.replace('sklearn', 'scikit_learn')}-{version}.dist-info"
    note.mkdir()
    (note / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def python(code: str, *words: object, **variables: str) -> str:
    """What a new Python prints that runs this code, without bytecode settings from around it."""
    kept = {name: value for name, value in environment().items() if "BYTECODE" not in name}
    kept.pop("PYTHONPYCACHEPREFIX", None)
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env=kept | variables,
        text=True,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout


def test_a_plain_run_imports_no_library_that_it_does_not_use(world: Path, tmp_path: Path) -> None:
    for name in ("sklearn", "torchao"):
        install(tmp_path / "site", name, "99.0", f"raise AssertionError('imported {name}')")
    paths = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path / "site")])
    flags = ("--training.steps", 1, "--job.dump_folder", tmp_path / "run")
    printed = python(RUN, "train", world / "run.toml", *flags, PYTHONPATH=paths)
    lines = dict(line.split(": ", 1) for line in printed.splitlines() if ": " in line)
    imported = lines["imported"].split()
    assert "lacuna.train.session" in imported
    assert [name for name in NOT_NEEDED if name in imported] == []
    assert lines["collects garbage"] == "True True"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Small packages with the names of the large ones, and no bytecode."""
    for name in ("torch", "transformers", "datasets"):
        install(tmp_path / "site", name, "1.0")
    return tmp_path / "site"


def kept(site: Path, code: str = KEEP, **variables: str) -> list[str]:
    """Python's folder for bytecode, whether it writes none, and where torch's should lie."""
    paths = os.pathsep.join([str(site), environment()["PYTHONPATH"]])
    caches = str(site.parent / "caches")
    return python(code, PYTHONPATH=paths, XDG_CACHE_HOME=caches, **variables).split()


def test_bytecode_is_kept_in_the_users_cache_where_python_would_keep_none(site: Path) -> None:
    prefix, writes_none, cached = kept(site, PYTHONDONTWRITEBYTECODE="1")
    folder = site.parent / "caches/lacuna/bytecode"
    assert Path(prefix).parent == folder
    assert writes_none == "False"
    assert cached.startswith(prefix)
    assert Path(cached).exists()
    assert not [*site.rglob("*.pyc")]
    assert Path(prefix).stat().st_mode & 0o777 == 0o700
    # The next start finds the same; after an update, another folder.
    assert kept(site, PYTHONDONTWRITEBYTECODE="1")[0] == prefix
    (site / "torch-1.0.dist-info").rename(site / "torch-1.1.dist-info")
    assert kept(site, PYTHONDONTWRITEBYTECODE="1")[0] != prefix
    # A folder that no run started from for a month is removed.
    os.utime(prefix, (0, 0))
    kept(site, PYTHONDONTWRITEBYTECODE="1")
    assert not Path(prefix).exists()


def test_processes_that_a_run_starts_find_its_bytecode(site: Path) -> None:
    code = KEEP + "import os; print(os.environ['PYTHONPYCACHEPREFIX'], [*os.environ])"
    prefix, _, _, inherited, *names = kept(site, code, PYTHONDONTWRITEBYTECODE="1")
    assert inherited == prefix
    assert "'PYTHONDONTWRITEBYTECODE'," not in names


def test_bytecode_of_libraries_that_are_read_only_is_kept_too(site: Path) -> None:
    code = f"import os; os.access = lambda *_: False{KEEP}"  # as for all but root
    assert Path(kept(site, code)[0]).parent == site.parent / "caches/lacuna/bytecode"


def test_python_is_left_as_it_is_where_bytecode_is_kept_or_not_wanted(site: Path) -> None:
    assert kept(site)[0] == "None"  # which has written it beside the sources
    python("import transformers, datasets", PYTHONPATH=str(site))
    assert kept(site, PYTHONDONTWRITEBYTECODE="1")[:2] == ["None", "True"]


def test_a_folder_for_bytecode_that_the_user_chose_is_left_to_them(site: Path) -> None:
    chosen = str(site.parent / "chosen")
    given = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": chosen}
    assert kept(site, **given)[:2] == [chosen, "True"]
    code = f"import sys; sys.dont_write_bytecode = True{KEEP}"  # as with -B
    assert kept(site, code)[:2] == ["None", "True"]


def test_bytecode_that_others_could_have_put_there_is_not_run(site: Path) -> None:
    prefix = Path(kept(site, PYTHONDONTWRITEBYTECODE="1")[0])
    prefix.chmod(0o777)
    assert kept(site, PYTHONDONTWRITEBYTECODE="1")[:2] == ["None", "True"]
