"""Draws the pictures of docs/fleet.md.

    python -m benchmarks.fleet_plots fleet.json         from the results of `python -m benchmarks.fleet`

`fleet-routers.svg` shows first tokens and hits by router, `fleet-flow.svg` the way of a request.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.fleet import ROUTERS, Results

INK, GREY, PALE = "#1f2933", "#52606d", "#9aa5b1"
COLOURS = {"one": "#6b7280", "round-robin": "#d1495b", "hash": "#e8a33d", "prefix": "#3a9d74", "state": "#1f6feb"}
ROW, HEAD, GAP = 19, 26, 14
NAMES, TIMES, HITS, END = 20, 116, 600, 790


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", **style: str) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    fill = "" if "fill" in style else f' fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{fill}{more}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = PALE, width: float = 1, more: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}" {more}/>'


def page(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head += f' font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{escape(label)}">'
    tip = f'<path d="M0 0 L10 5 L0 10 z" fill="{INK}"/>'
    marker = '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
    defs = f"<defs>{marker}{tip}</marker></defs>"
    return "\n".join([head, defs, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""])


# routers --------------------------------------------------------------------------------------------------------------


class Scale:
    """Seconds on a logarithmic axis from `low` to `high`, which are powers of ten."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.low, self.high = floor(log10(min(seconds))), ceil(log10(max(seconds)))

    def x(self, seconds: float) -> float:
        return TIMES + (log10(seconds) - self.low) / (self.high - self.low) * (HITS - 40 - TIMES)

    def ticks(self) -> list[tuple[float, str]]:
        powers = range(self.low, self.high + 1)
        return [(10.0**power, f"{10**power} s" if power >= 0 else f"{10 ** (power + 3):g} ms") for power in powers]


def routers(results: Results) -> str:
    """Return a panel for each model and trace: a row for each router, with its p50, p90, p99 and hits."""
    panels = [name for name in results if name.count("/") == 1]
    found = {panel: {r: results[f"{panel}/{r}"] for r in ROUTERS if f"{panel}/{r}" in results} for panel in panels}
    scale = Scale([each[name] for rows in found.values() for each in rows.values() for name in ("p50", "p99")])
    parts, y = _legend(), 64.0
    for panel, rows in found.items():
        parts += _panel(panel, rows, scale, y, len(ROUTERS))
        y += HEAD + ROW * len(ROUTERS) + GAP
    parts += [text(scale.x(at), y + 6, words, 11, "middle", fill=GREY) for at, words in scale.ticks()]
    label = "Time to the first token and hit tokens by router, for two models and two traces"
    return page(END + 20, int(y + 20), label, parts)


def _legend() -> list[str]:
    parts = [text(TIMES, 20, "time to the first token", 14, font_weight="600")]
    parts += [text(HITS, 20, "hit tokens", 14, font_weight="600")]
    parts += [f'<circle cx="{TIMES + 6}" cy="36" r="4.5" fill="{INK}"/>', text(TIMES + 16, 40, "p50", 11)]
    parts += [f'<circle cx="{TIMES + 62}" cy="36" r="4" fill="#fff" stroke="{INK}" stroke-width="1.5"/>']
    parts += [text(TIMES + 72, 40, "p90", 11), line(TIMES + 118, 31, TIMES + 118, 41, INK, 1.5)]
    return [*parts, text(TIMES + 126, 40, "p99", 11), text(HITS, 40, "share of the prompt tokens", 11, fill=GREY)]


def _panel(name: str, rows: Mapping[str, Mapping[str, float]], scale: Scale, top: float, count: int) -> list[str]:
    parts = [text(NAMES, top + 14, name.replace("/", ", "), 13, font_weight="600")]
    below = top + HEAD + ROW * count
    parts += [line(scale.x(at), top + HEAD - 4, scale.x(at), below, "#e4e7eb") for at, _ in scale.ticks()]
    for place, (router, found) in enumerate(rows.items()):
        y, colour = top + HEAD + ROW * place + ROW / 2, COLOURS[router]
        p50, p90, p99 = (scale.x(found[each]) for each in ("p50", "p90", "p99"))
        parts += [text(TIMES - 10, y + 4, router, 12, "end"), line(p50, y, p99, y, colour, 2)]
        parts += [line(p99, y - 5, p99, y + 5, colour, 2), f'<circle cx="{p50:.1f}" cy="{y}" r="5" fill="{colour}"/>']
        parts += [f'<circle cx="{p90:.1f}" cy="{y}" r="4" fill="#fff" stroke="{colour}" stroke-width="2"/>']
        width = (END - HITS - 46) * found["hits"]
        parts += [f'<rect x="{HITS}" y="{y - 6}" width="{width:.1f}" height="12" fill="{colour}"/>']
        parts += [text(HITS + width + 6, y + 4, f"{found['hits']:.1%}", 11)]
    return parts


# the way of a request -------------------------------------------------------------------------------------------------


def box(x: float, y: float, width: float, height: float, title: str, lines: Sequence[str]) -> list[str]:
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="#fff" stroke="{PALE}"'
    parts = [f'{shape} stroke-width="1.5"/>', text(x + 12, y + 22, title, 14, font_weight="600")]
    return parts + [text(x + 12, y + 42 + 17 * place, words, 12, fill=GREY) for place, words in enumerate(lines)]


def arrow(
    x1: float, y1: float, x2: float, y2: float, words: Sequence[str] = (), x: float = 0, y: float = 0
) -> list[str]:
    labels = [text(x, y + 15 * place, each, 12, font_style="italic") for place, each in enumerate(words)]
    return [line(x1, y1, x2, y2, INK, 1.5, 'marker-end="url(#tip)"'), *labels]


SERVER = ["keys, limits, 429 and 503", "reads, renders and", "tokenizes once", "detokenizes, streams"]
ROUTER = [
    "keys of the prompt's cells",
    "index: who holds which point",
    "price of each replica, in seconds:",
    "waiting (prompts, places, memory)",
    "+ computing + what it costs others",
]
NEWS = "news of every replica: points published and dropped; work done, places, memory, speed"


def flow() -> str:
    """Return the way of a request through server, router and replica, and of the news that come back."""
    parts = [text(20, 26, "The way of a request", 16, font_weight="600")]
    parts += box(20, 60, 140, 84, "client", ["HTTP, JSON", "server-sent events"])
    parts += box(272, 44, 250, 116, "server", SERVER)
    parts += box(272, 230, 250, 138, "router", ROUTER)
    for place, name in enumerate("ABC"):
        words = ["resumes at its point,", "computes the rest"] if name == "B" else ["planner, cache,", "tiers, device"]
        parts += box(760, 44 + 118 * place, 180, 84, f"replica {name}", words)
        parts += [line(940, 86 + 118 * place, 965, 86 + 118 * place, INK, 1.5)]
    parts += arrow(160, 90, 270, 90, ["prompt"], 186, 82)
    parts += arrow(272, 118, 162, 118, ["tokens"], 186, 136)
    parts += arrow(370, 160, 370, 228, ["token ids,", "salt, priority"], 276, 190)
    parts += arrow(450, 228, 450, 162, ["replicas,", "the best first"], 460, 190)
    parts += arrow(522, 118, 758, 190, ["token ids and salt"], 640, 134)
    parts += arrow(758, 214, 524, 144, ["tokens"], 610, 196)
    parts += [line(522, 70, 758, 70, INK, 1.5, 'stroke-dasharray="5 4" marker-end="url(#tip)"')]
    parts += [text(532, 60, "a retry, before the first token", 12, font_style="italic")]
    parts += [line(965, 86, 965, 400, INK, 1.5), line(965, 400, 397, 400, INK, 1.5), *arrow(397, 400, 397, 370)]
    parts += [text(410, 418, NEWS, 12, font_style="italic")]
    return page(990, 432, "The way of a request through server, router and replica", parts)


def main() -> None:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_plots", description=about)
    parser.add_argument("results", type=Path, help="JSON of python -m benchmarks.fleet")
    results = parser.parse_args().results
    docs = Path("docs")
    (docs / "fleet-flow.svg").write_text(flow())
    (docs / "lab" / "fleet-routers.svg").write_text(routers(json.loads(results.read_text())))


if __name__ == "__main__":
    main()
