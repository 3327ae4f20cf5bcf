"""Tells the rows of softpick_paper.py: as tables beside the paper's figures, and as curves.

python benchmarks/paper_table.py FOLDER [OTHER ...]

Writes FOLDER's rows.json, table.md and curves.svg of the rows in all of these folders.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

# Table 3 of arXiv 2504.20966, version 4 (340M parameters, 10,000 steps of 128 rows of 4,096):
# sinks above 0.2 and 0.3 in percent, and kurtosis. Beside `rectified` stands its softmax with ReLU,
# which may be another function.
PAPER = {
    "softmax": (47.97, 34.89, 6453),
    "softpick": (0.02, 0.00, 282),
    "scaled_softpick": (0.01, 0.00, 171),
    "rectified": (8.16, 4.56, 453),
    "gated_softmax": (5.00, 2.00, 136),
    "softmax_sinks": (19.34, 8.78, 1800),
    "softmax_plus_one": (24.38, 16.36, 574),
}
FORMS = ("rtn8", "rtn4", "rtn3", "rtn2", "int8", "nf4")
COLOURS = ("#1f77b4", "#d62728", "#ff7f0e", "#9467bd", "#2ca02c", "#17becf", "#8c564b")
WIDTH, HEIGHT, MARGIN = 420, 260, 50  # of a panel, in pixels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", type=Path)
    write(*parser.parse_args().folders)


def write(folder: Path, *others: Path) -> None:
    """Writes a folder's rows.json, table.md and curves.svg of all rows in it and in others."""
    paths = [path for one in (folder, *others) for path in sorted(one.glob("*-[0-9]*.json"))]
    found = {path.name: json.loads(path.read_text()) for path in paths}
    rows = [found[name] for name in sorted(found)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "table.md").write_text(table(rows))
    (folder / "curves.svg").write_text(drawn(rows))


def told(row: dict[str, Any]) -> str:
    """A row on one line."""
    sinks = f"sinks {row['sinks_0.2']:.1%} / {row['sinks_0.3']:.1%}"
    return (
        f"{row['arm']}, seed {row['seed']}: held-out loss {row['losses']['none']:.4f}, {sinks}, "
        f"kurtosis {row['kurtosis']:.0f}, largest {row['largest']:.1f}, sparsity "
        f"{row['sparsity']:.1%}"
    )


def by_arm(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each arm, with those first that have more seeds."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    return dict(sorted(arms.items(), key=lambda one: -len(one[1])))


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and with several values their standard deviation."""
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(statistics.stdev(values))}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Two tables in Markdown: what the models are like, and their losses in few bits.

    With several seeds both have means and standard deviations.
    """
    heads = ["arm", "seeds", "parameters", "held-out loss", "sinks > 0.2", "> 0.3"]
    heads += ["paper's", "kurtosis", "paper's", "largest", "sparsity"]
    lines = [line(heads), line(["---"] * len(heads))]
    bits = [line(["arm", "none", *FORMS]), line(["---"] * (len(FORMS) + 2))]
    for arm, own in by_arm(rows).items():
        known = PAPER.get(arm)
        sinks, kurtosis = "", ""
        if known is not None:
            sinks, kurtosis = f"{known[0]}% / {known[1]}%", f"{known[2]:,}"
        losses = [spread([row["losses"]["none"] for row in own], "{:.4f}")]
        cells = [arm, str(len(own)), f"{own[0]['parameters'] / 1e6:.1f}M", *losses]
        cells += [spread([row[f"sinks_{at}"] for row in own], "{:.1%}") for at in ("0.2", "0.3")]
        cells += [sinks, spread([row["kurtosis"] for row in own], "{:,.1f}"), kurtosis]
        cells += [spread([row["largest"] for row in own], "{:,.1f}")]
        cells += [spread([row["sparsity"] for row in own], "{:.1%}")]
        lines.append(line(cells))
        bits.append(line([arm, *losses, *(loss_in(own, form) for form in FORMS)]))
    return "\n".join([*map(of_runs, alike(rows)), "", *lines, "", *bits]) + "\n"


def alike(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of each kind of run: there should be one kind."""
    kinds = {of_runs(row): row for row in rows}
    return list(kinds.values())


def of_runs(row: dict[str, Any]) -> str:
    """What the runs of an arm are alike in with those of others."""
    lr = row["settings"]["optimizer"]["lr"]
    return (
        f"{row['steps']:,} steps, {row['tokens']:,} tokens in rows of {row['row_tokens']:,}, "
        f"lr {lr:g}; measured on {row['rows']} held-out rows; {row['device']}."
    )


def loss_in(rows: Sequence[dict[str, Any]], form: str) -> str:
    return spread([row["losses"][form] for row in rows], "{:.4f}")


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def drawn(rows: Sequence[dict[str, Any]]) -> str:
    """An SVG with four panels: loss, sinks and kurtosis by step, and loss by bits."""
    arms = by_arm(rows)
    panels = [
        ("held-out loss, by step", {arm: curve(own, "val_loss") for arm, own in arms.items()}),
        (
            "share of heads with sinks > 0.3, by step",
            {arm: curve(own, "attention_sinks_0.3") for arm, own in arms.items()},
        ),
        (
            "logarithm (base 10) of the kurtosis of hidden states, by step",
            {arm: logarithms(curve(own, "hidden_kurtosis")) for arm, own in arms.items()},
        ),
        (
            "held-out loss, by bits (round to nearest)",
            {arm: losses_of(own) for arm, own in arms.items()},
        ),
    ]
    size = f'width="{2 * WIDTH}" height="{2 * HEIGHT + 30}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="11">']
    parts.append(f'<rect {size} fill="white"/>')
    for place, (title, lines) in enumerate(panels):
        left, top = place % 2 * WIDTH, place // 2 * HEIGHT
        parts.append(f'<g transform="translate({left},{top})">{panel(title, lines)}</g>')
    for place, arm in enumerate(arms):
        left = 10 + place * (2 * WIDTH - 20) // max(len(arms), 1)
        colour = COLOURS[place % len(COLOURS)]
        text = f'<text x="{left}" y="{2 * HEIGHT + 20}" fill="{colour}">{escape(arm)}</text>'
        parts.append(text)
    return "\n".join([*parts, "</svg>\n"])


def curve(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """The mean over seeds of what was logged, by step."""
    values: dict[float, list[float]] = {}
    for row in rows:
        for one in row["curves"]:
            if one.get(key) is not None:
                values.setdefault(one["step"], []).append(one[key])
    return sorted((step, statistics.mean(found)) for step, found in values.items())


def logarithms(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(step, math.log10(value)) for step, value in points]


def losses_of(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    bits = (2, 3, 4, 8)
    return [(bit, statistics.mean(row["losses"][f"rtn{bit}"] for row in rows)) for bit in bits]


def panel(title: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """A panel with a line for each arm, and the least and largest of both axes."""
    points = [point for points in lines.values() for point in points]
    parts = [f'<text x="{MARGIN}" y="16" font-weight="bold">{escape(title)}</text>']
    if not points:
        return parts[0]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)

    def place(point: tuple[float, float]) -> str:
        share_x = (point[0] - low_x) / ((high_x - low_x) or 1)
        share_y = (point[1] - low_y) / ((high_y - low_y) or 1)
        x = MARGIN + share_x * (WIDTH - 1.5 * MARGIN)
        y = HEIGHT - MARGIN / 2 - share_y * (HEIGHT - 1.2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    bottom = HEIGHT - MARGIN // 2
    for value, y in ((low_y, bottom), (high_y, MARGIN // 2 + 14)):
        parts.append(f'<text x="2" y="{y}">{value:.4g}</text>')
    for value, x in ((low_x, MARGIN), (high_x, WIDTH - MARGIN)):
        parts.append(f'<text x="{x}" y="{HEIGHT - 8}">{value:g}</text>')
    for number, points in enumerate(lines.values()):
        told = " ".join(map(place, points))
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{told}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "".join(parts)


if __name__ == "__main__":
    main()
