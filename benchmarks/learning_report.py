"""What the runs of the learning experiment came to: JSON, a table and a picture."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learning_settings import TRL_WAYS
from learning_task import Sizes

SERIES = ("grpo", "success", "ppo", *TRL_WAYS)
COLOURS = {
    "grpo": "#1f77b4",
    "success": "#2ca02c",
    "ppo": "#9467bd",
    "trl": "#d62728",
    "trl-static": "#8c564b",
    "trl-batches": "#ff7f0e",
}
WARM_UP = 5
"""Steps that no speed is taken of: they compile."""
COLUMNS = (
    "runs",
    "seeds",
    "accuracy before",
    "accuracy after (lowest to highest)",
    "reward of the last tenth",
    "flat groups of the last tenth",
    "samples to the target",
    "updates/min",
    "GiB",
)

Curve = list[tuple[float, float]]


def device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def write(output: Path, sizes: Sizes, target: float | None) -> str:
    """Writes learning.json, .md and .svg of the runs in a folder; returns the table."""
    found = {name: series_of(output, name, sizes) for name in SERIES}
    found = {name: runs for name, runs in found.items() if runs}
    target = target or default_target(found)
    result = {
        "target": target,
        "task": {"samples a step": sizes.batch * sizes.samples, "held out": sizes.held_out},
        "calls": rows_of(output / "calls.jsonl"),
        "series": {name: summary(runs, target) for name, runs in found.items()},
        "runs": {f"{name}-{one['seed']}": one for name, runs in found.items() for one in runs},
    }
    result |= {"beside TRL": beside_trl(result["series"])}
    text = table(result)
    (output / "learning.json").write_text(json.dumps(result, indent=1))
    (output / "learning.md").write_text(text + "\n")
    (output / "learning.svg").write_text(picture(found))
    return text


def series_of(output: Path, name: str, sizes: Sizes) -> list[dict[str, Any]]:
    """What each seed's run of a series measured so far."""
    found = []
    for folder in sorted(output.glob(f"{name}-[0-9]*")):
        if folder.is_dir() and (rows := rows_of(folder / "metrics.jsonl")):
            found.append(measured(rows, sizes) | {"seed": int(folder.name.rpartition("-")[2])})
            found[-1]["is_done"] = (folder / "finished.json").exists()
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a file; the last may be cut off, as a run may be writing it."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def measured(rows: list[dict[str, Any]], sizes: Sizes) -> dict[str, Any]:
    """The curves of a run by samples, how long its updates took, and what memory.

    Completions that several updates train on count once. An update is one of the policy, whatever
    else is in it: completions, rewards, and no validation.
    """
    steps = [row for row in rows if row.get("reward") is not None and row["step"]]
    updates = 4 if any("critic_loss" in row for row in steps) else 1
    a_step = sizes.batch * sizes.samples / updates

    def curve(name: str) -> Curve:
        return [(row["step"] * a_step, row[name]) for row in rows if row.get(name) is not None]

    return {
        "accuracy": curve("val_pass_at_1"),
        "reward": curve("reward"),
        "flat_groups": curve("flat_groups"),
        "seconds": seconds_of(rows),
        "memory_gib": max((row["memory_gib"] for row in rows if "memory_gib" in row), default=None),
    }


def seconds_of(rows: list[dict[str, Any]]) -> list[float]:
    """How long each update took, validations left out: TRL's driver says so, our log implies it."""
    said = [row["seconds"] for row in rows if "seconds" in row]
    own = [row for row in rows if row.get("tokens_per_second")]
    tokens = [0, *(row["tokens"] for row in own)]
    steps = [0, *(row["step"] for row in own)]
    pairs = zip(own, tokens, steps, strict=False)
    return said or [
        (row["tokens"] - before) / row["tokens_per_second"] / (row["step"] - last)
        for row, before, last in pairs
    ]


def default_target(found: dict[str, list[dict[str, Any]]]) -> float | None:
    """Nine tenths of the way that GRPO's mean accuracy goes."""
    curves = [one["accuracy"] for one in found.get("grpo", []) if len(one["accuracy"]) > 1]
    if not curves:
        return None
    before = statistics.mean(curve[0][1] for curve in curves)
    best = statistics.mean(max(value for _, value in curve) for curve in curves)
    return before + 0.9 * (best - before) if best > before else None


def summary(runs: list[dict[str, Any]], target: float | None) -> dict[str, Any]:
    """The figures of a series over its seeds."""
    curves = [one["accuracy"] for one in runs if one["accuracy"]]
    speeds = [one["seconds"][WARM_UP:] or one["seconds"] for one in runs if one["seconds"]]
    memory = [one["memory_gib"] for one in runs if one["memory_gib"]]
    return {
        "seeds": len(runs),
        "are_done": all(one["is_done"] for one in runs),
        "accuracy_before": mean([curve[0][1] for curve in curves]),
        "accuracy_after": [curve[-1][1] for curve in curves],
        "reward": mean([end_of(one["reward"]) for one in runs]),
        "flat_groups": mean([end_of(one["flat_groups"]) for one in runs]),
        "samples_to_target": [reaches(curve, target) for curve in curves],
        "updates_a_minute": mean([60 / statistics.median(one) for one in speeds]),
        "memory_gib": max(memory, default=None),
    }


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def end_of(curve: Curve) -> float | None:
    """The mean of the last tenth of a curve."""
    last = curve[-max(len(curve) // 10, 1) :]
    return mean([value for _, value in last])


def reaches(curve: Curve, target: float | None) -> float | None:
    """The samples after which an accuracy is first as high; None where it never is."""
    reached = [place for place, value in curve if target is not None and value >= target]
    return min(reached, default=None)


def beside_trl(series: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How GRPO's figures compare with those of TRL's fastest way to generate."""
    peers = [series[name] for name in TRL_WAYS if name in series]
    peers = [one for one in peers if one["updates_a_minute"]]
    if not peers or not series.get("grpo", {}).get("updates_a_minute"):
        return {}
    peer = max(peers, key=lambda one: one["updates_a_minute"])
    own = series["grpo"]
    return {
        "updates_a_minute": own["updates_a_minute"] / peer["updates_a_minute"],
        "memory": own["memory_gib"] / peer["memory_gib"],
        "accuracy_after": [mean(own["accuracy_after"]), mean(peer["accuracy_after"])],
    }


def table(result: dict[str, Any]) -> str:
    """The summary as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for name, one in result["series"].items():
        after = one["accuracy_after"]
        reached = [said(value, ",.0f") for value in one["samples_to_target"]]
        cells = [
            name if one["are_done"] else f"{name} (not done)",
            str(one["seeds"]),
            said(one["accuracy_before"], ".3f"),
            f"{said(mean(after), '.3f')} ({min(after):.3f} to {max(after):.3f})" if after else "-",
            said(one["reward"], ".3f"),
            said(one["flat_groups"], ".2f"),
            ", ".join(reached),
            said(one["updates_a_minute"], ".1f"),
            said(one["memory_gib"], ".2f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"\ntarget: an accuracy of {said(result['target'], '.3f')}; device: {device()}")
    if beside := result["beside TRL"]:
        lines.append(
            f"GRPO beside TRL's fastest way: {beside['updates_a_minute']:.2f} × the updates a "
            f"minute, {beside['memory']:.2f} × the memory"
        )
    return "\n".join(lines)


def said(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def picture(found: dict[str, list[dict[str, Any]]]) -> str:
    """Accuracy and reward by samples as SVG: each series' mean, between its lowest and highest."""
    panels = [("accuracy", "held-out accuracy", 0), ("reward", "reward in training", 420)]
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="840" height="330" font-size="11">']
    parts.append('<g font-family="sans-serif">')
    for name, title, left in panels:
        bands = {series: band(runs, name) for series, runs in found.items()}
        parts += panel({series: one for series, one in bands.items() if one}, title, left)
    for number, series in enumerate(found):
        x = 60 + number * 110
        parts.append(f'<rect x="{x}" y="312" width="14" height="4" fill="{COLOURS[series]}"/>')
        parts.append(f'<text x="{x + 19}" y="318">{series}</text>')
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def band(runs: list[dict[str, Any]], name: str) -> list[tuple[float, float, float, float]]:
    """Samples, lowest, mean and highest of the runs, where all of them have a value; smoothed."""
    curves = [dict(smoothed(one[name])) for one in runs if one[name]]
    places = sorted(set.intersection(*(set(one) for one in curves))) if curves else []
    values = [(place, [one[place] for one in curves]) for place in places]
    return [(place, min(own), statistics.mean(own), max(own)) for place, own in values]


def smoothed(curve: Curve) -> Curve:
    """The means over a fortieth of the curve before each place."""
    width = max(len(curve) // 40, 1)
    windows = [(place, curve[max(0, n + 1 - width) : n + 1]) for n, (place, _) in enumerate(curve)]
    return [(place, statistics.mean(value for _, value in window)) for place, window in windows]


def panel(
    bands: dict[str, list[tuple[float, float, float, float]]], title: str, left: int
) -> list[str]:
    """A diagram from 0 to 0.5, or to 1 where it has to be, 340 × 250, with its axes."""
    longest = max((points[-1][0] for points in bands.values()), default=1) or 1
    most = max((high for points in bands.values() for *_, high in points), default=1)
    top = 0.5 if most <= 0.5 else 1.0

    def at(place: float, value: float) -> str:
        return f"{left + 60 + 340 * place / longest:.1f},{285 - 250 * value / top:.1f}"

    parts = [f'<text x="{left + 60}" y="22" font-weight="bold">{title}</text>']
    for fifth in range(6):
        value = top * fifth / 5
        ends = at(0, value), at(longest, value)
        parts.append(f'<polyline points="{" ".join(ends)}" stroke="#ddd"/>')
        parts.append(f'<text x="{left + 34}" y="{289 - 50 * fifth}">{value:.1f}</text>')
    for quarter in range(1, 5):
        place = longest * quarter / 4
        x = left + 60 + 85 * quarter
        parts.append(f'<text x="{x}" y="299" text-anchor="end">{place:,.0f} samples</text>')
    for series, points in bands.items():
        colour = COLOURS[series]
        below = [at(place, low) for place, low, _, _ in points]
        above = [at(place, high) for place, _, _, high in reversed(points)]
        line = " ".join(at(place, middle) for place, _, middle, _ in points)
        area = " ".join(below + above)
        parts.append(f'<polygon points="{area}" fill="{colour}" opacity="0.15"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
    return parts
