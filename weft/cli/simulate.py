"""`weft simulate`: replay traffic against the real planner and memory, on a device that only keeps time."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from weft.base.errors import OptionError
from weft.base.options import memory_bytes, option

if TYPE_CHECKING:
    from weft.simulate.runs import Setup
    from weft.simulate.simulation import Found
    from weft.simulate.stepping import Simulated

ABOUT = "replay traffic against planner and memory alone, and tell what a cache would be worth"
# As in weft.simulate.workloads, weft.memory.eviction and weft.memory.captures; a test compares.
KINDS = (
    "lmsys",
    "sharegpt",
    "coding",
    "compacting",
    "tools",
    "system-prompts",
    "retrieval",
    "best-of-n",
    "tree-search",
    "unique",
    "scan",
)
EVICTIONS = ("value", "lru", "flops")
REASONS = ("junction", "popular", "boundaries", "regular", "answers", "candidates")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What is sent, to which model, with how much memory, and how that is used."""

    workload: str = option("sharegpt", "made-up traffic, unless there is a trace", KINDS)
    trace: str | None = option(None, "a trace file in Mooncake's format; may be compressed (.gz)")
    requests: int = option(2000, "about how many requests; of a trace, at most so many, 0: all")
    rate: float = option(0.0, "sessions a second; 0: the workload's own pace")
    trace_speed: float = option(1.0, "play the trace's arrivals so many times faster")
    seed: int = option(0, "seed of the made-up traffic")
    model: str = option(
        "qwen3-next-mini", "a name that --weights dummy knows, or a folder or file with a model's config.json"
    )
    memory: str = option("10%", "for pages and states: bytes such as 40GiB, or a share of the working set such as 10%")
    eviction: tuple[str, ...] = option((), "what is given up first: value (default), lru or flops; may be repeated")
    without: tuple[str, ...] = option((), f"reasons not to keep a state for: {', '.join(REASONS)}; may be repeated")
    capture_every: int = option(0, "tokens between kept states; 0: by what a state costs")
    alpha: float = option(-1.0, "weight of work against recency of flops; below 0: found from the first requests")
    cache: bool = option(True, "reuse what was computed for earlier prompts")
    max_sequences: int = option(64, "how many sequences run at once; others wait")
    max_tokens_per_step: int = option(8192, "how many tokens are computed in one step; longer prompts go in chunks")
    max_length: int = option(200_000, "tokens of prompt and answer together; longer ones are refused")
    stride: int = option(64, "tokens that decodes may take at once while nothing else happens; 1: as the engine does")
    oracle: bool = option(True, "also tell what a cache without bounds would reuse; needs memory for all that was seen")
    calibrate: str | None = option(None, "take the device's rates from this result of `weft bench --json`")
    explain: bool = option(False, "rank the reasons why prefixes were missed, and tell what was kept and hit")
    json: str | None = option(None, "also write everything found to this file")
    plot: str | None = option(None, "also draw memory over time to this file (SVG)")
    progress: bool = option(True, "show a progress bar on a terminal")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata["choices"]
            if choices and value not in choices:
                raise OptionError(f"{each.name} must be one of {', '.join(choices)}, got {value!r}")
        for name, known in (("eviction", EVICTIONS), ("without", REASONS)):
            for value in getattr(self, name):
                if value not in known:
                    raise OptionError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        least = {"requests": 0, "rate": 0, "capture_every": 0, "max_sequences": 1, "max_tokens_per_step": 1}
        for name, low in (least | {"max_length": 1, "stride": 1}).items():
            if not getattr(self, name) >= low:
                raise OptionError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not self.trace_speed > 0:
            raise OptionError(f"trace_speed must be positive, got {self.trace_speed}")
        if self.trace is None and not self.requests:
            raise OptionError("requests must be at least 1 without a trace")
        read_memory(self.memory)


def read_memory(value: str) -> int | float:
    """Bytes, or a share of the working set.

    >>> read_memory("2GiB"), read_memory("10%")
    (2147483648, 0.1)
    """
    if not value.endswith("%"):
        found = memory_bytes(value)
        if found is None:
            raise OptionError("memory must be bytes or a share such as 10%: there is no machine to measure")
        return found
    try:
        share = float(value[:-1]) / 100
    except ValueError:
        share = 0.0
    if not share > 0:
        raise OptionError(f"memory must be bytes such as 40GiB or a share such as 10%, got {value!r}")
    return share


def run(options: SimulateOptions) -> int:
    from weft.simulate.plots import memory_course
    from weft.simulate.report import explained, table, write

    rows: dict[str, Found] = {}
    for eviction in options.eviction or ("value",):
        rows[eviction] = _simulate(setup_of(options, eviction), options.progress)
    print(table(rows))
    if options.explain:
        for name, found in rows.items():
            print("\n" + explained(found, name if len(rows) > 1 else None))
    if options.json is not None:
        write(options.json, options, rows)
    if options.plot is not None:
        first = next(iter(rows.values()))
        write_text("plot", options.plot, memory_course(first.course, "Memory in use"))
    return 0 if all(found.requests for found in rows.values()) else 1


def setup_of(options: SimulateOptions, eviction: str) -> Setup:
    from weft.memory.captures import Captures
    from weft.simulate.costs import calibrated, cost_model
    from weft.simulate.runs import Setup, Traffic

    cost = cost_model(options.model)
    if options.calibrate is not None:
        cost = calibrated(cost, options.calibrate)
    traffic = Traffic(
        options.workload, options.requests, options.seed, options.rate or None, options.trace, options.trace_speed
    )
    return Setup(
        traffic,
        cost,
        read_memory(options.memory),
        eviction,
        Captures(**dict.fromkeys(options.without, False)),
        options.capture_every,
        options.max_sequences,
        options.max_tokens_per_step,
        options.max_length,
        options.stride,
        options.oracle,
        None if options.alpha < 0 else options.alpha,
        options.cache,
    )


def _simulate(setup: Setup, progress: bool) -> Found:
    from tqdm import tqdm

    from weft.simulate.runs import run as run_setup

    shown = None if progress else True
    with tqdm(total=setup.traffic.requests or None, unit="request", disable=shown, leave=False, file=sys.stderr) as bar:

        def tell(_: Simulated) -> None:
            bar.update()

        return run_setup(setup, tell)


def write_text(name: str, path: str, text: str) -> None:
    from pathlib import Path

    try:
        Path(path).write_text(text)
    except OSError as error:
        raise OptionError(f"{name} {path} cannot be written: {error.strerror}") from None
