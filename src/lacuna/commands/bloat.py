"""`lacuna bloat`: counts the package's statements, core and extensions apart, and its lines."""

import ast
from pathlib import Path

from lacuna.commands.arguments import CommandParser

PACKAGE = Path(__file__).parent.parent

# The core is what a reader must understand to follow the training of a dense model in any layout.
CORE_LIMIT = 7200  # 5,000 is what is aimed at; docs/log.md has why it is not kept
EXTENSION_LIMIT = 400

# All else is in modules of their own: what they add -> these modules, in the package.
EXTENSIONS = {
    "quantisation": ("model/quantization.py",),
    "GGUF": ("data/gguf.py", "export/gguf.py"),
    "drawings": ("plan/draw.py",),
    "uploads": ("train/hub.py",),
    "experts": ("model/router.py",),
    "plans": ("plan/dry_run.py", "plan/examples.py"),
    "preference": (
        "data/judged.py",
        "data/preferences.py",
        "objective/preference.py",
        "objective/reference.py",
    ),
    "distillation": ("objective/distillation.py",),
    "rollouts": ("rollout/generate.py",),
}


def statements(source: str) -> int:
    """How many statements there are, however they are laid out.

    A string that stands alone is documentation, of a setting as of a function, and is not counted.
    """
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return sum(not _is_documentation(statement) for statement in found)


def _is_documentation(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def counts(package: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The statements of each room of the core, and of each extension."""
    core: dict[str, int] = {}
    extensions = dict.fromkeys(EXTENSIONS, 0)
    extension_of = {file: name for name, files in EXTENSIONS.items() for file in files}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        count = statements(path.read_text())
        if place.as_posix() in extension_of:
            extensions[extension_of[place.as_posix()]] += count
        else:
            core[str(place.parent)] = core.get(str(place.parent), 0) + count
    return core, extensions


def run(words: list[str]) -> int:
    """Prints statements by room and extension, and lines; status 1 where a limit is passed."""
    CommandParser(prog="lacuna bloat", description=__doc__).parse_args(words)
    core, extensions = counts(PACKAGE)
    for room, count in core.items():
        print(f"{room:<14} {count:>6,}")
    print(f"{'core':<14} {sum(core.values()):>6,} of {CORE_LIMIT:,} statements")
    for extension, count in extensions.items():
        print(f"{extension:<14} {count:>6,} of {EXTENSION_LIMIT:,}")
    lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    print(f"{'all files':<14} {lines:>6,} lines")
    too_many = sum(core.values()) >= CORE_LIMIT
    return int(too_many or max(extensions.values()) > EXTENSION_LIMIT)
