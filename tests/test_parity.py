"""The tables of parity have every layout, and each cell is exact or refused with a reason.

Slow tests of the layouts compute such cells anew.
"""

from pathlib import Path

from parity import (
    ARCHITECTURES,
    CASES,
    EXACT,
    EXPERT_ARCHITECTURES,
    EXPERT_CASES,
    TASK_ARCHITECTURES,
    TASK_CASES,
    tasks_by_rewards,
    tasks_taught_by,
)

TABLES = Path(__file__).parent.parent / "docs" / "parity.md"


def is_exact(cell: str) -> bool:
    return all(float(number) < EXACT for number in cell.split(" / "))


def check(text: str, columns: list[str], layouts: list[str], refusals: int) -> None:
    """Fails unless the only table in `text` has these columns and rows, and what was exact is."""
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    assert head == ["layout", *columns]
    assert [name for name, *_ in rows] == layouts
    reasons = {f"refused ({number})" for number in range(1, refusals + 1)}
    for name, *cells in rows:
        assert all(cell in reasons or is_exact(cell) for cell in cells), name


def test_every_layout_is_exact_or_refused_with_a_reason() -> None:
    text = TABLES.read_text()
    others, _, tasks = text.partition("## Preference, distillation and reward models")
    pretraining, _, experts = others.partition("## Mixtures of experts")
    tasks, _, completions = tasks.partition("## Completions")
    completions, _, reasons = completions.partition("Refused when the configuration is read:")
    refusals = len(reasons.strip().splitlines())
    check(pretraining, [*ARCHITECTURES], [*CASES], refusals)
    check(experts, [*EXPERT_ARCHITECTURES], [*EXPERT_CASES], refusals)
    columns = [
        f"{name}, {architecture}"
        for architecture in TASK_ARCHITECTURES
        for name in tasks_taught_by(Path())
    ]
    check(tasks, columns, [*TASK_CASES], refusals)
    columns = [
        f"{name}, {architecture}"
        for architecture in TASK_ARCHITECTURES
        for name in tasks_by_rewards()
    ]
    check(completions, columns, [*TASK_CASES], refusals)
