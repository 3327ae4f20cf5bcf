"""The table of architectures says of each cell that it is exact, or why lacuna refuses it."""

import re
from pathlib import Path

from architectures import COLUMNS, EXACT, is_exact

TABLE = Path(__file__).parent.parent / "docs" / "architectures.md"


def test_every_architecture_is_exact_or_refused_with_a_reason() -> None:
    text = TABLE.read_text()
    refusals = re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE)
    reasons = {
        f"({number})" for number, reason in refusals if not reason.startswith("transformers:")
    }
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    table = {row[0]: row[2:] for row in rows[1:]}
    assert len(table) > 170
    assert all(len(cells) == len(COLUMNS) - 1 for cells in table.values())
    third = {
        kind: cells
        for kind, cells in table.items()
        if not all(is_exact(c) or c in reasons for c in cells)
    }
    assert not third, f"above {EXACT} and not refused: {third}"
