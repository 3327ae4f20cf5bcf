"""A few of the newest completions with what they are worth, as a table on the terminal."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from lacuna.config import logger
from lacuna.rollout.groups import Group

# Lines that a prompt or a completion has in the table; columns of the terminal left for one number.
_LINES = 3
_NUMBER_COLUMNS = 12
_NARROWEST = 12


def show_completions(
    groups: Sequence[Group], step: int, count: int, leave_out: Sequence[str] = ()
) -> None:
    """Shows `count` completions of a prompt where this process logs to a terminal.

    The prompt is the first whose rewards differ; the best and the worst of its completions are
    among those shown.
    """
    consoles = [one.console for one in logger.handlers if isinstance(one, RichHandler)]
    if not consoles or not count:
        return
    group = next((one for one in groups if one.varies), groups[0])
    consoles[0].print(completions_table(group, step, count, consoles[0], leave_out))


def completions_table(
    group: Group, step: int, count: int, console: Console, leave_out: Sequence[str] = ()
) -> Table:
    """The table of some completions of a group, as wide as the terminal."""
    rows = [row for row in group.rows(step) if row["reward"] is not None] or group.rows(step)
    rows.sort(key=lambda row: row["reward"] or 0.0, reverse=True)
    last = len(rows) - 1
    places = {round(last * place / max(count - 1, 1)) for place in range(min(count, len(rows)))}
    scores = () if "scores" in leave_out else group.scores
    numbers = [*scores, "reward", "advantage"]
    numbers = [name for name in numbers if name not in leave_out]
    wide = max(_NARROWEST, console.width - _NUMBER_COLUMNS * len(numbers))
    prompt = _cut(group.prompt, _LINES * console.width)
    title = Text.assemble((f"completions of step {step}\n", "dim"), prompt)
    table = Table(title=title, title_justify="left", title_style="", expand=True)
    table.add_column("completion", ratio=1, min_width=_NARROWEST, overflow="fold")
    for name in numbers:
        head = Text(_plain(name))
        table.add_column(head, justify="right", overflow="fold", max_width=_NUMBER_COLUMNS - 3)
    for place in sorted(places):
        row = rows[place]
        worth = row["scores"] | {name: row[name] for name in ("reward", "advantage")}
        texts = [_number(worth[name]) for name in numbers]
        table.add_row(*map(Text, (_cut(row["completion"], _LINES * wide), *texts)))
    return table


def _cut(text: str, longest: int) -> str:
    """A text without ends of lines, and without its middle if it is too long."""
    plain = _plain(text)
    if len(plain) <= longest:
        return plain
    half = (longest - 3) // 2
    return f"{plain[:half]} … {plain[-half:]}"


def _plain(text: str) -> str:
    """A text whose characters all show; others, such as ends of lines, as Python writes them."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"
