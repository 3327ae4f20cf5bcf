"""What `lacuna bench` shows: tables, and bars of memory and of time, also as a picture."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lacuna.config.console import open_console
from lacuna.config.machine import MetricsConfig

WIDTH = 100
BAR = 40
COLOURS = ("#9ecbff", "#a6e3a1", "#8be0d8", "#f5c26b", "#e69ab8", "#8a919c")
PARTS = ("parameters", "gradients", "optimizer", "activations_and_rest")


def show(record: dict[str, Any], settings: MetricsConfig) -> None:
    """Prints a record on the terminal."""
    console = open_console(settings)
    for part in _parts(record):
        console.print(part, soft_wrap=isinstance(part, Text))


def save_picture(record: dict[str, Any], path: str) -> None:
    """Draws a record in an SVG file."""
    from lacuna.plan.draw import SVG

    picture = Console(record=True, file=io.StringIO(), width=WIDTH, highlight=False)
    for part in _parts(record):
        picture.print(part)
    picture.save_svg(path, title=f"lacuna bench {record['run']}", code_format=SVG)


def _parts(record: dict[str, Any]) -> list[Text | Table]:
    """What is shown, from top to bottom."""
    own = record["lacuna"]
    device = record["device"]
    title = Text(
        f"{record['run']}: {record['model']}, {record['parameters'] / 1e6:,.1f} M parameters, on "
        f"{device['processes']} × {device['name']}; {len(own['windows'])} windows of "
        f"{record['steps_of_a_window']} steps"
    )
    if record["balanced_experts"]:
        title.append("\nexperts balanced by force: a time, of another model than this run trains")
    step = own["kernels"]
    milliseconds = {name: 1000 * seconds for name, seconds in step["seconds"].items()}
    return [
        title,
        _figures(record),
        Text(f"\nA step under the profiler, {1000 * step['step_seconds']:,.1f} ms"),
        _bars(milliseconds, "ms"),
        Text("\nPeak memory of a rank"),
        _bars({name.replace("_", " "): own["memory_gib"][name] for name in PARTS}, "GiB"),
    ]


def _figures(record: dict[str, Any]) -> Table:
    """Speed and memory, ours and where there is one, the peer's beside it with the ratio."""
    names = ["lacuna", *filter(None, [record.get("against")])]
    sides = [record[name] for name in names]
    memory = [side["memory_gib"] for side in sides]
    ratios = {name: f"{ratio:.3f} ×" for name, ratio in record.get("ratio", {}).items()}
    table = Table("", *names, *(["lacuna / it"] if ratios else []), box=None, padding=(0, 3, 0, 0))
    speeds = [
        f"{speed['median']:,.0f} (spread {speed['spread']:.1%})"
        for speed in (side["tokens_per_second"] for side in sides)
    ]
    table.add_row("tokens/s", *speeds, ratios.get("tokens_per_second"))
    if record["lacuna"]["mfu"]:
        table.add_row("mfu", f"{record['lacuna']['mfu']['median']:.1%}")
    reserved = [f"{one['reserved']:.2f} GiB" for one in memory]
    table.add_row("memory, reserved", *reserved, ratios.get("memory"))
    if all(one["allocated"] for one in memory):
        table.add_row("memory, allocated", *(f"{one['allocated']:.2f} GiB" for one in memory))
    table.add_row("loss of step 1", *(f"{side['first_loss']:.4f}" for side in sides))
    return table


def _bars(values: dict[str, float], unit: str) -> Table:
    """A line with a bar for every value."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    whole = sum(values.values())
    for (name, value), colour in zip(values.items(), COLOURS, strict=False):
        share = value / whole if whole else 0.0
        bar = Text("█" * round(BAR * max(share, 0)), style=colour)
        table.add_row(name, Text(f"{value:,.2f} {unit}", justify="right"), f"{share:.1%}", bar)
    return table
