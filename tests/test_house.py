"""The house keeps its order: imports flow one way, files are short, the whole is small."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lacuna.commands import bloat

PACKAGE = Path(bloat.__file__).parent.parent
STOREYS = (
    {"__main__", "cli", "imports", "launch", "commands"},
    {"train", "plan"},
    {"objective"},
    {"rollout"},
    {"formats"},
    {"model"},
    {"parallel"},
    {"data"},
    {"config"},
    {"recipes"},
)
"""Rooms from the top down.

Those on one line do not import each other, but for the face, which is one room.
"""

GIVEN_ALL_SETTINGS = {
    # Checking how sections go together, and writing them all down, is what they are for, as it is
    # of the room config/.
    "parallel/processes.py": ("require_same_config",),
    "train/hints.py": (
        "closing_hints",
        "_flags_for_longer",
        "_flags_for_other_data",
        "_example_prompt",
    ),
    "commands/bench.py": ("_check_peer", "_measure_here"),
    # A run, and what a command makes of it: they hand each part its sections.
    "train/setup.py": ("__init__",),
    "train/session.py": ("train_here", "_train_and_export"),
    "commands/teach.py": ("_teach",),
    "objective/teaching.py": ("write_likeliest", "teaching_config"),
    "objective/accepted_answers.py": ("write_answers",),
    "plan/dry_run.py": ("dry_run",),
    "plan/draw.py": ("draw",),
    "plan/examples.py": ("show_data",),
    "plan/memory.py": ("estimate_memory",),
    # The recipes: data and models depend on more sections than a signature can name, and are made
    # for runs, teachers and references alike. Each step of a recipe is given its own.
    "data/plan.py": ("make_row_plan",),
    "data/loader.py": ("build_loader", "build_validation"),
    "model/build.py": ("build_meta_model", "build_model", "_fill", "build_frozen"),
    "model/layers/replacement.py": ("replace_layers",),
    "formats/opening.py": ("_model_with_empty_adapters",),
    # They make other settings of a whole run: of a stage, of a teacher, of what is measured.
    "parallel/batch.py": ("curriculum_batches",),
    "train/resume.py": ("inputs_of", "files_of_frozen", "way_to_start_anew"),
    "objective/teacher.py": ("build_teacher", "teacher_config"),
    "train/bench.py": ("measured_config", "measure"),
    # An objective may be a user's own, and read anything (docs/objectives.md).
    "objective/find.py": ("check", "frozen_models"),
    "objective/language_modelling.py": ("check", "frozen_models"),
    "objective/distillation.py": ("check", "frozen_models"),
    "objective/preference.py": ("check", "frozen_models"),
    "objective/on_policy.py": ("begin",),
    "objective/worth.py": ("functions_of",),
    "objective/on_policy_distillation.py": ("check", "frozen_models"),
    "objective/grpo.py": ("check", "frozen_models", "_kind"),
    "objective/ppo.py": ("check", "frozen_models", "_kind"),
    "objective/reward.py": ("check",),
    "objective/critic.py": ("critic_config", "check_critic", "build_critic"),
}
"""The functions that are given the whole `Config`, by their file, and why."""

FACE = STOREYS[0]
STOREY_OF = {room: storey for storey, rooms in enumerate(STOREYS) for room in rooms}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[tuple[str, int]]:
    """Rooms of the package that a module imports, anywhere in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [
                f"{node.module}.{alias.name}" if node.module == "lacuna" else str(node.module)
                for alias in node.names
            ]
        for name in names:
            package, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            if package == "lacuna" and room in STOREY_OF:
                yield room, node.lineno


def test_every_folder_is_a_known_room() -> None:
    assert {room_of(path) for path in modules()} - {"__init__"} <= STOREY_OF.keys()


def test_a_room_imports_only_from_rooms_below() -> None:
    wrong = []
    for path in modules():
        room = room_of(path)
        if room == "__init__":
            continue
        for other, line in imported_rooms(path):
            allowed = other == room or {other, room} <= FACE
            if not allowed and STOREY_OF[other] <= STOREY_OF[room]:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {other}")
    assert wrong == []


def test_the_loop_and_its_layouts_name_no_objective() -> None:
    """They are given one, found by its task, and nothing in them speaks of what it minimises."""
    tasks = (
        "language_modelling",
        "cross_entropy",
        "distill",
        "preference",
        "grpo",
        "ppo",
        '"sft"',
        '"pretrain"',
    )
    named = [
        f"{path.relative_to(PACKAGE)}: {task}"
        for path in modules()
        if room_of(path) in ("train", "parallel")
        for task in tasks
        if task in path.read_text()
    ]
    assert named == []


def test_no_file_has_more_than_300_lines_and_no_function_more_than_50() -> None:
    too_long = []
    for path in modules():
        text = path.read_text()
        if len(text.splitlines()) > 300:
            too_long.append(f"{path.relative_to(PACKAGE)}")
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (node.end_lineno or 0) - node.lineno >= 50:
                too_long.append(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert too_long == []


def functions_given_all_settings(path: Path) -> set[str]:
    """The functions of a module with a parameter that is a `Config`, or holds some."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = node.args
        extra = [one for one in (given.vararg, given.kwarg) if one is not None]
        for one in [*given.posonlyargs, *given.args, *given.kwonlyargs, *extra]:
            written = "" if one.annotation is None else ast.unparse(one.annotation)
            if re.search(r"\bConfig\b", written):
                found.add(node.name)
    return found


def test_functions_take_what_they_read_and_not_the_whole_configuration() -> None:
    """So a signature says what a function depends on, and nobody forges settings to call one."""
    found = {
        path.relative_to(PACKAGE).as_posix(): functions_given_all_settings(path)
        for path in modules()
        if room_of(path) != "config"
    }
    given = {file: functions for file, functions in found.items() if functions}
    assert given == {file: set(functions) for file, functions in GIVEN_ALL_SETTINGS.items()}


def test_core_and_extensions_stay_below_their_limits() -> None:
    core, extensions = bloat.counts(PACKAGE)
    assert sum(core.values()) < bloat.CORE_LIMIT == 7800
    assert max(extensions.values()) <= bloat.EXTENSION_LIMIT == 400
    assert bloat.run([]) == 0


def test_every_extension_has_files() -> None:
    files = [PACKAGE / file for files in bloat.EXTENSIONS.values() for file in files]
    assert [file for file in files if not file.is_file()] == []


def imports_at_once(path: Path) -> Iterator[str]:
    """The modules that are imported as soon as a module is, by their dotted names."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_core_imports_an_extension_only_when_something_asks_for_it() -> None:
    files = {file for files in bloat.EXTENSIONS.values() for file in files}
    extensions = {f"lacuna.{file.removesuffix('.py').replace('/', '.')}" for file in files}
    core = [path for path in modules() if path.relative_to(PACKAGE).as_posix() not in files]
    wrong = [
        path.relative_to(PACKAGE).as_posix()
        for path in core
        if extensions.intersection(imports_at_once(path))
    ]
    assert wrong == []
