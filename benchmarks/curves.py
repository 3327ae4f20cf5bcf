"""A picture of losses: curves over steps or seconds, and lines that they are measured by."""

from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 420, 60, 50
GREY = "#888888"
SHOWN = 0.35
"""The share of the losses, from the lowest, that is drawn: the first are so high that nothing else
could be told apart beside them."""


class Curve(NamedTuple):
    """Curves of one name have one colour, and are named once."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def drawn(curves: Sequence[Curve], over: str, marks: Sequence[float] = (), marked: str = "") -> str:
    """An SVG of losses `over` something, with level lines at the `marks`, if there are any."""
    longest = max(x for curve in curves for x, _ in curve.points)
    losses = [loss for curve in curves for _, loss in curve.points]
    lowest = min(losses)
    highest = min(max(losses), lowest + SHOWN * (max(losses) - lowest))

    def x(value: float) -> float:
        return LEFT + value / longest * (WIDTH - LEFT - 20)

    def y(loss: float) -> float:
        return 20 + (highest - loss) / (highest - lowest) * (HEIGHT - BOTTOM - 40)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for part in range(6):
        value, loss = longest * part / 5, lowest + (highest - lowest) * part / 5
        parts += [
            text(x(value), HEIGHT - BOTTOM + 18, f"{value:.3g}", "middle"),
            text(LEFT - 8, y(loss) + 4, f"{loss:.3f}", "end"),
            stroke([(LEFT, y(loss)), (WIDTH - 20, y(loss))], "#dddddd", 1),
        ]
    parts.append(text(WIDTH / 2, HEIGHT - 12, over, "middle"))
    for curve in curves:
        points = [(x(value), y(loss)) for value, loss in curve.points if loss <= highest]
        parts.append(stroke(points, curve.colour, 1.8))
    parts += [stroke([(LEFT, y(mark)), (WIDTH - 20, y(mark))], GREY, 1) for mark in marks]
    names = {curve.name: curve.colour for curve in curves}
    if marked:
        names[marked] = GREY
    for number, (name, colour) in enumerate(names.items()):
        parts.append(text(WIDTH - 30, 36 + 18 * number, name, "end", colour))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    inner = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{inner}\n</svg>\n'


def stroke(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def text(x: float, y: float, words: str, anchor: str, colour: str = "#333333") -> str:
    font = f'font-family="sans-serif" font-size="13" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {font}>{words}</text>'
