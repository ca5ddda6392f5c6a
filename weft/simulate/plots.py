"""Small plots as hand-written SVG: lines over an axis, bars, and bytes by kind over time. Needs no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 36, 44
COLOURS = ("#1f6feb", "#d1495b", "#e8a33d", "#3a9d74", "#7b5ea7", "#6b7280", "#0aa2c0")
Points = Sequence[tuple[float, float]]


class Frame:
    """Maps values to positions on the page."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], logarithmic: bool = False) -> None:
        self._log = logarithmic
        self.low, self.high = self._x(min(xs)), self._x(max(xs))
        self.top = max(max(ys), 1e-12)

    def _x(self, value: float) -> float:
        return log10(max(value, 1e-12)) if self._log else value

    def x(self, value: float) -> float:
        span = max(self.high - self.low, 1e-12)
        return LEFT + (self._x(value) - self.low) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def lines(
    title: str,
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    logarithmic: bool = False,
    percent: bool = False,
) -> str:
    """Return a plot with one line for each series, and a legend at its right."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    frame = Frame(xs, [*ys, 1.0] if percent else ys, logarithmic)
    parts = _axes(frame, title, x_label, y_label, _ticks(xs, logarithmic), percent)
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) < 40:
            parts += [
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.5" fill="{colour}"/>' for x, y in points
            ]
        parts += _legend(number, name, colour)
    return _page(parts)


def bars(title: str, series: Mapping[str, Mapping[str, float]], y_label: str, mark: float | None = None) -> str:
    """Return a plot with groups of bars: each series has a value for every group; `mark` is a reference line."""
    groups = list(next(iter(series.values())))
    values = [value for each in series.values() for value in each.values()]
    frame = Frame([0.0, float(len(groups))], [*values, mark or 0.0])
    parts = _axes(frame, title, "", y_label, [], percent=False)
    width = (WIDTH - LEFT - RIGHT) / len(groups)
    for number, (name, each) in enumerate(series.items()):
        colour, each_width = COLOURS[number % len(COLOURS)], 0.8 * width / len(series)
        for place, group in enumerate(groups):
            x, y = LEFT + width * (place + 0.1) + each_width * number, frame.y(each[group])
            size = f'width="{each_width:.1f}" height="{frame.y(0) - y:.1f}"'
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>')
        parts += _legend(number, name, colour)
    for place, group in enumerate(groups):
        x, y = LEFT + width * (place + 0.5), HEIGHT - BOTTOM + 12
        # Slanted, since many names are close together.
        parts.append(f'<g transform="rotate(-25 {x:.1f} {y})">{_text(x, y, group, size=9, anchor="end")}</g>')
    if mark is not None:
        y = frame.y(mark)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#111" stroke-dasharray="4 3"/>'
        )
    return _page(parts)


def memory_course(course: Sequence[tuple[float, Mapping[str, int]]], title: str) -> str:
    """Return a plot of the bytes in use by kind over time."""
    kinds = list(course[0][1]) if course else []
    series = {kind: [(seconds, used[kind] / 2**30) for seconds, used in course] for kind in kinds}
    if not series:
        return _page([_text(WIDTH / 2, HEIGHT / 2, "no data")])
    return lines(title, series, "seconds", "GiB")


def _ticks(xs: Sequence[float], logarithmic: bool) -> list[float]:
    """Return every value if there are few; otherwise some round ones between.

    >>> _ticks([1, 2, 4], True), _ticks(range(0, 1001), False)
    ([1, 2, 4], [0, 200, 400, 600, 800, 1000])
    """
    few = sorted(set(xs))
    if len(few) < 10 or logarithmic:
        return few if len(few) < 10 else []
    size = 10 ** floor(log10((few[-1] - few[0]) / 3))
    step = next(size * times for times in (1, 2, 5, 10) if (few[-1] - few[0]) / (size * times) <= 6)
    return [step * number for number in range(ceil(few[0] / step), floor(few[-1] / step) + 1)]


def _axes(frame: Frame, title: str, x_label: str, y_label: str, ticks: Sequence[float], percent: bool) -> list[str]:
    parts = [_text((LEFT + WIDTH - RIGHT) / 2, 20, title, size=14, weight="bold")]
    for step in range(5):
        value = frame.top * step / 4
        y = frame.y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        told = f"{value:.0%}" if percent else f"{value:.3g}"
        parts.append(_text(LEFT - 6, y + 4, told, anchor="end"))
    for tick in ticks:
        parts.append(_text(frame.x(tick), HEIGHT - BOTTOM + 14, f"{tick:g}"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label))
    place = f"{14} {HEIGHT / 2}"
    parts.append(f'<text x="14" y="{HEIGHT / 2}" font-size="11" text-anchor="middle" transform="rotate(-90 {place})">')
    parts[-1] += f"{escape(y_label)}</text>"
    return parts


def _legend(number: int, name: str, colour: str) -> list[str]:
    y = TOP + 16 * number
    box = f'<rect x="{WIDTH - RIGHT + 12}" y="{y}" width="10" height="10" fill="{colour}"/>'
    return [box, _text(WIDTH - RIGHT + 27, y + 9, name, anchor="start")]


def _text(x: float, y: float, text: str, size: int = 11, anchor: str = "middle", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _page(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>", ""])
